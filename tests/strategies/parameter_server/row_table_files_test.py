"""Rows of tables without a vocabulary go between servers and files, in blocks."""

import contextlib
import os
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import dynamic_tables, parameter_servers
from tests.strategies.parameter_server import local_servers
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer, pieces
from tf_strategies.keras import row_table, row_updates
from tf_strategies.strategies.parameter_server import (
  changed_rows,
  row_table_files,
  server_table,
  table_files,
)

_WIDTH = dynamic_tables.WIDTH
_IDS = np.arange(-100, 100) * 2**40 + 3
_STATE = {
  'ids': _IDS,
  'rows': np.arange(200.0 * (_WIDTH + 2)).reshape([200, -1]) + 1,
  'Adam.m': -np.arange(200.0 * (_WIDTH + 1)).reshape([200, -1]) - 1,
}
_ROW_BYTES = 8 + 4 * (_WIDTH + 2) + 4 * (_WIDTH + 1)

_read = row_table_files.read


def _momentum(rows, slots, gradient):
  """A rule by which the order of steps matters."""
  slot = 0.5 * slots['Adam.m'] + tf.convert_to_tensor(gradient)
  return rows - 0.1 * slot, {'Adam.m': slot}


def _ids_of(step):
  """Some that all steps use, some that few use, and one that is new."""
  return np.concatenate([_IDS[:4], _IDS[10 + step :: 50], [step + 7]])


def _bytes_of_its_own(path):
  """Of rows in files that no other checkpoint has."""
  files = [
    os.stat(os.path.join(path, f)) for f in os.listdir(path) if '.d' in f
  ]
  return sum(f.st_size for f in files if f.st_nlink == 1)


class RowTableFilesTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())
    # Blocks of 25 rows on servers and of 10 here.
    for name, size in (
      ('_SERVER_BLOCK_BYTES', 600),
      ('_COORDINATOR_BLOCK_BYTES', 240),
    ):
      self.enter_context(mock.patch.object(table_files, name, size))
    self.store = checkpointer.Checkpointer(self.create_tempdir().full_path)
    self.files = table_files.TableFiles(3)

  def make(self, servers, state=None):
    variable = keras.Variable(tf.zeros([1, _WIDTH]), name='table')
    shards = [
      server_table.ServerShard(i, 'table', _WIDTH, dynamic_tables.first_rows)
      for i in range(servers)
    ]
    table = row_table.RowTable(variable, shards)
    table.load_slots(['Adam.m'])
    if state:
      for column in self.columns(table):
        column.assign(state[column.key])
    return table

  def columns(self, table):
    return [*table.columns(), *table.slot_columns()]

  def state(self, table):
    return {column.key: column.numpy() for column in self.columns(table)}

  def named(self, table):
    columns = self.columns(table)
    return row_table_files.tables_among({c.path: c for c in columns})

  def save(self, table, **variables):
    saved = {}
    tables = table_files.tables_among(variables)

    def write(directory):
      saved.update(self.files.save(directory, tables, self.named(table)))
      return saved

    path = self.store.save({}, {}, write)
    self.files.commit(path, saved)
    return path

  def restore(self, table, **options):
    found = self.store.open(self.store.paths()[-1], self.files.check)
    self.files.restore(
      found.path, found.arrays, {}, self.named(table), **options
    )

  def assert_state(self, table, expected=_STATE):
    found = self.state(table)
    self.assertEqual(set(found), set(expected))
    for key, value in expected.items():
      self.assertAllEqual(value, found[key], key)

  @contextlib.contextmanager
  def blind(self, *servers):
    """Makes servers see no files."""
    real = tf.io.read_file

    def read(path):
      device = tf.constant(0).device
      if any(device == local_servers.device(s) for s in servers):
        raise tf.errors.NotFoundError(None, None, path)
      return real(path)

    with mock.patch.object(tf.io, 'read_file', read):
      yield

  @parameterized.product(
    servers=((2, 3), (3, 1), (2, 2)), blind=((), (1,), (0, 1, 2))
  )
  def test_saved_and_restored_on_other_servers(self, servers, blind):
    saved, loaded = self.make(servers[0], _STATE), self.make(servers[1])
    with self.blind(*blind):
      self.save(saved)
      self.restore(loaded)
    self.assert_state(loaded)
    # In one process, without servers.
    arrays = self.store.newest().arrays
    order = np.argsort(arrays['table/ids'])
    for key, value in _STATE.items():
      self.assertAllEqual(arrays[f'table/{key}'][order], value)

  @parameterized.named_parameters(
    ('rows_of_others', 'owner', lambda self, ids: tf.zeros_like(ids, tf.int32)),
    ('no_slot', 'slot_columns', lambda self: []),
  )
  def test_mutations_are_seen(self, name, mutation):
    saved, loaded = self.make(2, _STATE), self.make(3)
    with mock.patch.object(row_table.RowTable, name, mutation):
      self.save(saved)
      self.restore(loaded)
    with self.assertRaises(AssertionError):
      self.assert_state(loaded)

  def test_what_is_there_is_gone(self):
    table = self.make(2, _STATE)
    self.save(table)
    column = self.columns(table)[0]
    column.assign(np.array([5, 6]))
    self.assertEqual(table.report()['rows'], 0)
    other = {k: np.repeat(v[:1], 2, 0) * 0 + 7 for k, v in _STATE.items()}
    other['ids'] = np.array([5, 6])
    for each in self.columns(table):
      each.assign(other[each.key])
    self.restore(table)
    self.assert_state(table)

  @parameterized.parameters((0, 25), (1, 25), (3, 10))
  def test_nobody_holds_more_than_a_block(self, blind, most):
    table, loaded = self.make(2, _STATE), self.make(3)
    rows = []
    write = pieces.write

    def note(directory, file, first, values):
      rows.append(int(values.shape[0]))
      return write(directory, file, first, values)

    with (
      mock.patch.object(pieces, 'write', note),
      self.blind(*range(blind)),
    ):
      self.save(table)
    self.assertEqual(max(rows), most)
    real = pieces.read
    read = []

    def note_read(*args):
      read.append(int(real(*args).shape[0]))
      return real(*args)

    with mock.patch.object(pieces, 'read', note_read):
      self.restore(loaded)
    self.assertEqual(max(read), most)
    self.assert_state(loaded)

  def test_of_as_many_servers_each_reads_its_own(self):
    table, loaded = self.make(2, _STATE), self.make(2)
    self.save(table)
    sizes = table.report()['by_shard']
    real, read = row_table_files.read, []

    def note(named, shard, blocks, rows_of, scope):
      def rows_of_block(name, first, rows):
        read.append((shard.server, name, rows))
        return rows_of(name, first, rows)

      real(named, shard, blocks, rows_of_block, scope)

    with mock.patch.object(row_table_files, 'read', note):
      self.restore(loaded)
    for server, size in enumerate(sizes):
      rows = [n for s, name, n in read if (s, name) == (server, 'table/rows')]
      self.assertEqual(sum(rows), size)

  def test_only_what_was_lost_is_restored(self):
    table = self.make(2, _STATE)
    self.save(table)
    for column in self.columns(table)[1:]:
      column.assign(_STATE[column.key] * 0 + 9)
    table.shards[1].is_lost = True
    with self.assertRaisesRegex(
      errors.DataError, 'lost with parameter server 1'
    ):
      self.save(table)
    self.restore(table, only_lost=True)
    self.assertFalse(table.shards[1].is_lost)
    is_lost = table.owner(tf.constant(_IDS)).numpy()[:, None] == 1
    for key in ('rows', 'Adam.m'):
      expected = np.where(is_lost, _STATE[key], 9)
      self.assertAllEqual(self.state(table)[key], expected)

  def test_a_shard_that_could_not_be_read_stays_lost(self):
    table = self.make(2, _STATE)
    path = self.save(table)
    table.shards[1].is_lost = True
    found = self.store.open(path)
    name = found.arrays.tables['table/Adam.m'].pieces[-1].file
    os.remove(pieces.paths(path, pieces.Piece(name, 0, 0, ''))[0])
    with self.assertRaises(errors.DataError):
      self.files.restore(
        path, found.arrays, {}, self.named(table), only_lost=True
      )
    self.assertTrue(table.shards[1].is_lost)

  def test_arrays_of_another_checkpoint_are_read_in_blocks(self):
    """As older ones are, and those of one device."""
    arrays = {f'table/{key}': np.array(v) for key, v in _STATE.items()}
    arrays = {
      k: v if k == 'table/ids' else v.astype(np.float32)
      for k, v in arrays.items()
    }
    self.store.save(arrays, {})
    loaded = self.make(2)
    stored = checkpointer.StoredArrays
    with mock.patch.object(stored, '__getitem__', side_effect=AssertionError):
      self.restore(loaded)
    self.assert_state(loaded)

  def train(self, table, step):
    ids = _ids_of(step)
    owner = table.owner(tf.constant(ids)).numpy()
    for number, shard in enumerate(table.shards):
      mine = tf.constant(ids[owner == number])
      gradients = tf.cast(mine[:, None] % 7, tf.float32) * tf.ones([_WIDTH])

      @tf.function
      def update(shard=shard, mine=mine, gradients=gradients):
        initial = {'Adam.m': tf.zeros([_WIDTH])}
        found = shard.updated(mine, gradients, float(step), _momentum, initial)
        shard.store(*found)

      with tf.device(shard.device):
        update()

  def test_only_what_changed_is_written_again(self):
    table = self.make(2, _STATE)
    first = self.save(table)
    self.assertEqual(_bytes_of_its_own(first), 200 * _ROW_BYTES)
    self.train(table, 0)
    second = self.save(table)
    changed = set(_ids_of(0))
    self.assertEqual(_bytes_of_its_own(second), len(changed) * _ROW_BYTES)
    # Those since all were written; the next ones come on top.
    self.train(table, 1)
    changed |= set(_ids_of(1))
    third = self.save(table)
    self.assertEqual(_bytes_of_its_own(third), len(changed) * _ROW_BYTES)
    # Nothing else: the same again.
    fourth = self.save(table)
    self.assertEqual(_bytes_of_its_own(fourth), len(changed) * _ROW_BYTES)

  @parameterized.product(servers=(1, 2, 3), blind=((), (1,)))
  def test_a_run_that_is_saved_often_has_the_same_bits(self, servers, blind):
    self.assert_same_bits(servers, blind)

  def assert_same_bits(self, servers, blind=()):
    """Also of rows that were removed, and of those that were trained again."""
    whole, saved = self.make(2, _STATE), self.make(2, _STATE)
    self.save(saved)
    for step in range(4):
      for table in (whole, saved):
        self.train(table, step)
        if step == 2:
          self.assertEqual(table.expire(None, 44), 10)
      with self.blind(*blind):
        path = self.save(saved)
    stored = self.store.open(path).arrays.specs['table/ids'].shape[0]
    self.assertGreater(stored, 200)
    loaded, one = self.make(servers), self.make(1)
    with self.blind(*blind):
      self.restore(loaded)
    # As one process without servers does.
    for column in self.columns(one):
      column.assign(self.store.newest().arrays[column.path])
    for table in (loaded, one):
      self.assert_state(table, self.state(whole))
    for table in (whole, loaded):
      self.train(table, 4)
    self.assert_state(loaded, self.state(whole))
    self.assertEqual(loaded.report()['rows'], whole.report()['rows'])

  @parameterized.named_parameters(
    ('no_mark', changed_rows.ChangedIds, 'note', lambda *unused: None),
    ('none_is_gone', row_table_files, 'is_gone',
     lambda rows: tf.zeros([tf.shape(rows)[0]], tf.bool)),
    ('older_rows_last', row_table_files, 'read',
     lambda named, shard, blocks, *others: _read(
       named, shard, blocks[::-1], *others)),
  )  # fmt: skip
  def test_mutations_of_increments_are_seen(self, owner, name, mutation):
    with (
      mock.patch.object(owner, name, mutation),
      self.assertRaises(AssertionError),
    ):
      self.assert_same_bits(3)

  @parameterized.named_parameters(
    (
      'another_optimizer',
      lambda table: [table.load_slots(names) for names in ([], ['Adam.m'])],
    ),
    ('rows_are_loaded', lambda table: table.shards[1].clear()),
    ('a_server_is_another', lambda table: table.shards[0]._make()),
  )
  def test_all_rows_are_written_after(self, change):
    table = self.make(2, _STATE)
    self.save(table)
    change(table)
    path = self.save(table)
    rows = table.report()['rows']
    self.assertEqual(_bytes_of_its_own(path), rows * _ROW_BYTES)

  def test_where_most_rows_changed_all_are_written(self):
    table = self.make(2, _STATE)
    self.save(table)
    table.expire(None, 900)
    path = self.save(table)
    rows = table.report()['rows']
    self.assertEqual(rows, 50)
    self.assertEqual(_bytes_of_its_own(path), rows * _ROW_BYTES)

  def test_tables_of_both_kinds_share_their_files(self):
    table = self.make(2, _STATE)
    variable = local_servers.variable(0, np.ones([1000, 3], np.float32))
    variable.watch_rows()
    files = []
    with (
      mock.patch.object(table_files, '_TABLE_BYTES', 6000),
      mock.patch.object(table_files, '_MAX_SHARED', 1),
    ):
      for _ in range(4):
        path = self.save(table, other=variable)
        tables = self.store.open(path).arrays.tables
        files.append([tables[n].pieces[0].file for n in ('other', 'table/ids')])
    first, second, third, fourth = files
    self.assertEqual((first, third), (second, fourth))
    self.assertEmpty(set(first) & set(third))

  def test_a_large_table_that_is_read_whole_is_told(self):
    variable = keras.Variable(tf.zeros([1, _WIDTH]), name='users')
    rows = dynamic_tables.first_rows
    table = server_table.ServerTable(None, variable, rows, 2, lambda do: do())
    with (
      mock.patch.object(
        row_updates, '_memory_bytes', lambda: 8 * (4 * 200 * _WIDTH - 1)
      ),
      self.assertWarnsRegex(
        errors.LargeTableWarning, "table 'users' of parameter servers, 0 MB"
      ),
    ):
      for column in table.columns():
        column.assign(_STATE[column.key])
      table.columns()[1].numpy()

  def test_an_empty_table(self):
    loaded = self.make(3, _STATE)
    self.save(self.make(2))
    self.restore(loaded)
    self.assertEqual(loaded.report()['rows'], 0)


_ROWS = 1_000_000
_LARGE_WIDTH = 16
_STEP_ROWS = 20_000


def without_servers(directory):
  """The same, if no server sees the directory."""
  nobody = lambda *unused: frozenset()  # noqa: E731
  with mock.patch.object(table_files.TableFiles, '_asked', nobody):
    return save_and_load_many(directory)


def save_and_load_many(directory):
  """How much the coordinator grew to save, to load and to read a table."""
  strategy = tfs.ParameterServerStrategy(checkpoint_dir=directory)
  with strategy.scope():
    ids = keras.Input([], dtype='int64')
    layer = tfs.keras.DynamicEmbedding(_LARGE_WIDTH)
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile('adagrad', 'mse')
  # A function of the batch's number, since arrays would be in memory.
  data = tf.data.Dataset.range(_ROWS).batch(_STEP_ROWS)
  data = data.map(lambda ids: (ids * 2**30, tf.ones([_STEP_ROWS, 1])))
  model.fit(data, verbose=0)
  strategy.save()  # What is made once.
  before = model.predict(tf.range(64, dtype=tf.int64) * 2**30, verbose=0)
  table = layer._table
  actions = {
    'save': strategy.save,
    'load': lambda: strategy.restore(model=model, optimizer=model.optimizer),
    'read': lambda: [
      c.numpy() for c in [*table.columns(), *table.slot_columns()]
    ],
  }
  grown = {name: _growth(action) for name, action in actions.items()}
  after = model.predict(tf.range(64, dtype=tf.int64) * 2**30, verbose=0)
  rows = layer.report()['rows']
  strategy.close()
  return grown, rows, before, after


def _growth(action):
  """By how many bytes this process is larger at most than before."""
  with open('/proc/self/clear_refs', 'w') as f:
    f.write('5')  # Its peak is what it is now.
  before = _peak()
  action()
  return _peak() - before


def _peak():
  with open('/proc/self/status') as f:
    line = next(line for line in f if line.startswith('VmHWM:'))
  return 1024 * int(line.split()[1])


@pytest.mark.multi_process
@pytest.mark.soak
class MemoryTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters((save_and_load_many, 8e6), (without_servers, 64e6))
  def test_the_coordinator_holds_no_table(self, program, most):
    table = _ROWS * (8 + 4 * (_LARGE_WIDTH + 2) + 4 * (_LARGE_WIDTH + 1))
    with parameter_servers.Job(num_workers=1, num_ps=2) as job:
      found = job.run(program, (self.create_tempdir().full_path,))
    grown, rows, before, after = found
    megabytes = {name: f'{size / 1e6:.1f} MB' for name, size in grown.items()}
    print(f'{rows} rows of {table / 1e6:.0f} MB:', megabytes)
    self.assertEqual(rows, _ROWS)
    self.assertAllEqual(before, after)
    self.assertLess(grown['save'], most)
    self.assertLess(grown['load'], most)
    # Which shows that growth is seen.
    self.assertGreater(grown['read'], 0.9 * table)


if __name__ == '__main__':
  tf.test.main()
