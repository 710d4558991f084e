"""Tables are saved by those who see the files, and restored on any servers."""

import contextlib
import os
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import local_servers
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer
from tf_strategies.strategies.parameter_server import (
  changed_rows,
  table_files,
)

# Rows of 12 bytes that tell their place.
_ROWS = 1000
_VALUE = np.arange(_ROWS * 3, dtype=np.float32).reshape(_ROWS, 3)


_rows_of = table_files.pieces.rows_of


class TableFilesTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())
    # Blocks of 150 rows on servers and 80 here: no part is a whole number of them.
    for name, size in (
      ('_TABLE_BYTES', 6000),
      ('_SERVER_BLOCK_BYTES', 1800),
      ('_COORDINATOR_BLOCK_BYTES', 960),
    ):
      self.enter_context(mock.patch.object(table_files, name, size))
    self.store = checkpointer.Checkpointer(self.create_tempdir().full_path)
    self.files = table_files.TableFiles(3)

  def make(self, parts=2, value=_VALUE):
    variable = (
      local_servers.partitioned_variable(value, parts)
      if parts > 1
      else local_servers.variable(0, value)
    )
    for part, _ in table_files.parts_of(variable):
      part.watch_rows()
    return variable

  def save(self, **named):
    saved = {}

    def write(directory):
      tables = table_files.tables_among(named)
      saved.update(self.files.save(directory, tables))
      return saved

    path = self.store.save({}, {}, write)
    self.files.commit(path, saved)
    return path

  def restore(self, path=None, files=None, **named):
    found = self.store.open(path or self.store.paths()[-1], self.files.check)
    (files or self.files).restore(
      found.path, found.arrays, table_files.tables_among(named)
    )

  @contextlib.contextmanager
  def blind(self, *servers):
    """Makes servers see no files."""
    real = tf.io.read_file
    here = local_servers.device

    def read(path):
      device = tf.constant(0).device
      if any(device == here(s) for s in servers):
        raise tf.errors.NotFoundError(None, None, path)
      return real(path)

    with mock.patch.object(tf.io, 'read_file', read):
      yield

  @parameterized.product(
    parts=((1, 2), (2, 3), (3, 1), (3, 2)), blind=((), (1,), (0, 1, 2))
  )
  def test_saved_and_restored_on_other_servers(self, parts, blind):
    saved, loaded = self.make(parts[0]), self.make(parts[1], 0 * _VALUE)
    with self.blind(*blind):
      self.save(table=saved)
      self.restore(table=loaded)
    self.assertAllEqual(loaded.numpy(), _VALUE)
    # In one process, without servers.
    self.assertAllEqual(self.store.newest().arrays['table'], _VALUE)

  def test_who_writes(self):
    """A server what it holds; the coordinator for one that sees nothing."""
    devices = []
    write = table_files.pieces.write

    def note(directory, file, first, rows):
      devices.append((tf.constant(0).device[-1], first, int(rows.shape[0])))
      return write(directory, file, first, rows)

    table = self.make(2)
    with mock.patch.object(table_files.pieces, 'write', note), self.blind(1):
      self.save(table=table)
    by_device = {d: [w[1:] for w in devices if w[0] == d] for d, *_ in devices}
    self.assertEqual(set(by_device), {'1', '0'})
    self.assertEqual(
      by_device['1'], [(0, 150), (150, 150), (300, 150), (450, 50)]
    )
    self.assertEqual(
      by_device['0'], [*((b, 80) for b in range(500, 980, 80)), (980, 20)]
    )

  @parameterized.parameters((0,), (1,), (2,))
  def test_nobody_holds_more_than_a_block(self, first):
    """Of parts, whoever they belong to."""
    table, loaded = self.make(2), self.make(3, 0 * _VALUE)
    with self.blind(*range(first)):
      self.save(table=table)
    largest = [0]
    real = table_files.pieces.read

    def read(*args):
      rows = real(*args)
      largest[0] = max(largest[0], int(rows.shape[0]))
      return rows

    with mock.patch.object(table_files.pieces, 'read', read):
      self.restore(table=loaded)
    self.assertBetween(largest[0], 80, 150)

  def test_an_array_of_another_checkpoint_is_read_in_blocks(self):
    self.store.save({'table': _VALUE, 'small': np.ones(3)}, {})
    loaded = self.make(2, 0 * _VALUE)
    arrays = checkpointer.StoredArrays
    with mock.patch.object(arrays, '__getitem__', side_effect=AssertionError):
      self.restore(table=loaded)
    self.assertAllEqual(loaded.numpy(), _VALUE)

  @pytest.mark.smoke
  def test_only_what_changed_is_written_again(self):
    table, loaded = self.make(2), self.make(3, 0 * _VALUE)
    first = self.save(table=table)
    rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([499, 7]))
    table.parts[1].scatter_add(rows)
    table.parts[0].scatter_nd_update([[3]], [[5.0, 6.0, 7.0]])
    expected = _VALUE.copy()
    expected[[999, 507]] += 1
    expected[3] = 5, 6, 7
    second = self.save(table=table)
    (found,) = self.store.open(second).arrays.tables.values()
    self.assertEqual([c.numbers.rows for c in found.changes], [1, 2])
    for piece in found.pieces:
      for old, new in zip(
        table_files.pieces.paths(first, piece),
        table_files.pieces.paths(second, piece),
        strict=True,
      ):
        self.assertTrue(os.path.samefile(old, new))
    self.restore(table=loaded)
    self.assertAllEqual(loaded.numpy(), expected)
    # Changes are those since all rows were written; others come on top.
    table.parts[0].scatter_update(
      tf.IndexedSlices(tf.zeros([1, 3]), tf.constant([4]))
    )
    expected[4] = 0
    self.save(table=table)
    self.restore(table=loaded)
    self.assertAllEqual(loaded.numpy(), expected)
    self.assertAllEqual(self.store.newest().arrays['table'], expected)

  @parameterized.parameters(
    lambda v: v.assign(v.numpy() + 1),
    lambda v: [p.assign_add(tf.ones([500, 3])) for p in v.parts],
    lambda v: [
      v.parts[i].scatter_add(tf.IndexedSlices(tf.ones([n, 3]), tf.range(n)))
      for i, n in ((0, 500), (1, 1))
    ],
  )
  def test_where_most_rows_changed_all_are_written(self, write):
    table, loaded = self.make(2), self.make(1, 0 * _VALUE)
    self.save(table=table)
    write(table)
    path = self.save(table=table)
    (found,) = self.store.open(path).arrays.tables.values()
    self.assertEqual(found.changes, ())
    self.restore(table=loaded)
    self.assertAllEqual(loaded.numpy(), table.numpy())
    self.assertNotAllEqual(loaded.numpy(), _VALUE)

  @parameterized.parameters(
    lambda part: part.assign(tf.zeros([500, 3])),
    lambda part: part.assign_sub(tf.ones([500, 3])),
    lambda part: part.write_directly(tf.zeros([500, 3]), None),
    lambda part: part.scatter_nd_add(
      [[i] for i in range(500)], tf.ones([500, 3])
    ),
  )
  def test_a_part_of_which_all_rows_changed(self, write):
    table, loaded = self.make(2), self.make(3, 0 * _VALUE)
    self.save(table=table)
    write(table.parts[1])
    path = self.save(table=table)
    (found,) = self.store.open(path).arrays.tables.values()
    self.assertEqual(sum(c.numbers.rows for c in found.changes), 500)
    self.restore(table=loaded)
    self.assertAllEqual(loaded.numpy(), table.numpy())
    self.assertNotAllEqual(loaded.numpy(), _VALUE)

  def test_all_are_written_again_after_some_checkpoints(self):
    table = self.make(2)
    shares = []
    with mock.patch.object(table_files, '_MAX_SHARED', 3):
      for i in range(9):
        table.parts[0].scatter_add(
          tf.IndexedSlices(tf.ones([1, 3]), tf.constant([i]))
        )
        path = self.save(table=table)
        (found,) = self.store.open(path).arrays.tables.values()
        shares.append(len(found.changes))
    self.assertEqual(shares, [0, 1, 1, 1, 0, 1, 1, 1, 0])

  def test_what_a_step_writes_is_noted(self):
    """In a function too, and only there where it was."""
    table = self.make(2)
    self.save(table=table)

    @tf.function
    def step(row):
      table.parts[1].scatter_sub(tf.IndexedSlices(tf.ones([1, 3]), row[None]))

    step(tf.constant(3))
    step(tf.constant(3))
    step(tf.constant(8))
    first, second = (part.changed for part in table.parts)
    self.assertEqual((first.count(), second.count()), (0, 2))
    self.assertAllEqual(second.numbers(), [3, 8])

  @parameterized.parameters(1, 2)
  def test_what_a_checkpoint_of_tensorflow_restores_is_noted(self, parts):
    table, loaded = self.make(parts), self.make(2, 0 * _VALUE)
    saved = tf.train.Checkpoint(v=self.make(parts, _VALUE + 1)).save(
      self.create_tempdir().full_path + '/c'
    )
    self.save(table=table)
    tf.train.Checkpoint(v=table).restore(saved).assert_consumed()
    self.save(table=table)
    self.restore(table=loaded)
    self.assertAllEqual(loaded.numpy(), _VALUE + 1)

  @parameterized.parameters(True, False)
  def test_without_links_all_rows_are_written(self, has_links):
    table = self.make(2)
    self.save(table=table)
    with contextlib.ExitStack() as stack:
      if not has_links:
        stack.enter_context(
          mock.patch.object(os, 'link', side_effect=PermissionError)
        )
      path = self.save(table=table)
    files = {os.stat(os.path.join(path, f)).st_nlink for f in os.listdir(path)}
    self.assertEqual(files, {1, 2} if has_links else {1})
    self.assertAllEqual(self.store.open(path).arrays['table'], _VALUE)

  @parameterized.parameters((), (0, 1, 2))
  def test_servers_find_damage(self, *blind):
    table = self.make(2)
    path = self.save(table=table)
    name = next(f for f in sorted(os.listdir(path)) if '.data' in f)
    with open(os.path.join(path, name), 'r+b') as f:
      f.write(b'\x01')
    loaded = self.make(2, 0 * _VALUE)
    with self.blind(*blind), self.assertRaises(errors.DataError):
      self.restore(table=loaded)
    self.assertAllEqual(loaded.numpy(), 0 * _VALUE)

  @parameterized.named_parameters(
    ('no_mark', changed_rows.ChangedRows, 'note', lambda *unused: None),
    ('marks_of_others', changed_rows.ChangedRows, 'numbers',
     lambda self: tf.constant([0], tf.int64)),
    ('first_rows_everywhere', table_files.pieces, 'rows_of',
     lambda path, table, first, rows, here: _rows_of(
       path, table, 0, rows, here)),
    ('changes_first', table_files.pieces, 'rows_of',
     lambda *args: reversed(list(_rows_of(*args)))),
  )  # fmt: skip
  def test_mutations_are_seen(self, owner, name, mutation):
    with (
      mock.patch.object(owner, name, mutation),
      self.assertRaises(AssertionError),
    ):
      self.test_only_what_changed_is_written_again()

  def test_a_lost_table_is_not_saved(self):
    table = self.make(2)
    table.parts[1].is_lost = True
    with self.assertRaisesRegex(errors.DataError, 'was lost'):
      self.save(table=table)
    self.assertEmpty(self.store.paths())

  def test_small_variables_are_no_tables(self):
    self.assertTrue(table_files.is_table([_ROWS, 3], tf.float32))
    self.assertFalse(table_files.is_table([400, 3], tf.float32))
    self.assertFalse(table_files.is_table([], tf.float32))
    self.assertFalse(table_files.is_table([10**6], tf.string))
    self.assertEmpty(
      table_files.tables_among({'w': local_servers.variable(0, _VALUE[:400])})
    )


if __name__ == '__main__':
  tf.test.main()
