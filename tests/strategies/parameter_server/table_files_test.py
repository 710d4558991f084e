"""Tables of both kinds go between servers and files, in blocks."""

import contextlib
import os
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import dynamic_tables, tiers
from tests.strategies.parameter_server import local_servers
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer, pieces
from tf_strategies.keras.tables import row_table, row_updates
from tf_strategies.strategies.parameter_server import partitioned, table_files

_WIDTH = dynamic_tables.WIDTH
# Rows that tell their place: of a variable, and of a table without a vocabulary.
_VARIABLE = {
  'table': np.arange(200 * (_WIDTH + 2), dtype=np.float32).reshape(200, -1)
}
_ROW_TABLE = {
  'table/ids': np.arange(-100, 100) * 2**40 + 3,
  'table/rows': _VARIABLE['table'] + 1,
  'table/Adam.m': -np.arange(200.0 * (_WIDTH + 1)).reshape([200, -1]) - 1,
}
_STATES = {'variable': _VARIABLE, 'row_table': _ROW_TABLE}
_KINDS = tuple(_STATES)


def _make_variable(servers, value):
  if servers == 1:
    return local_servers.variable(0, value['table'])
  return local_servers.partitioned_variable(value['table'], servers)


def _make_row_table(servers, value):
  variable = keras.Variable(tf.zeros([1, _WIDTH]), name='table')
  shards = [
    partitioned.ServerShard(i, 'table', _WIDTH, dynamic_tables.first_rows)
    for i in range(servers)
  ]
  table = row_table.RowTable(variable, shards)
  table.load_slots(['Adam.m'])
  for column in _columns(table).values():
    column.assign(value[column.path])
  return table


def _columns(table):
  found = [*table.columns(), *table.slot_columns()]
  return {column.path: column for column in found}


class TableFilesTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())
    # Blocks of 25 rows on servers and of 10 here.
    for name, size in (
      ('_TABLE_BYTES', 1000),
      ('_SERVER_BLOCK_BYTES', 600),
      ('_COORDINATOR_BLOCK_BYTES', 240),
    ):
      self.enter_context(mock.patch.object(table_files, name, size))
    self.store = checkpointer.Checkpointer(
      self.create_tempdir().full_path,
      check_tables=lambda *tables: self.files.check(*tables),
    )
    self.files = table_files.TableFiles(3)

  def make(self, kind, servers, value=None):
    """Returns the objects to save, by name: a table with these or other rows."""
    if value is None:
      value = {name: v[::2] * 0 + 9 for name, v in _STATES[kind].items()}
      if kind == 'variable':
        value = {'table': _VARIABLE['table'] * 0}
      else:
        value['table/ids'] = np.arange(100)
    if kind == 'variable':
      return {'table': _make_variable(servers, value)}
    return _columns(_make_row_table(servers, value))

  def shards(self, named):
    [table] = table_files.tables_among(named)
    return [shard.holder for shard in table]

  def save(self, named):
    tables = table_files.tables_among(named)
    return self.store.save({}, {}, lambda d: self.files.save(d, tables))

  def restore(self, named):
    found = self.store.open(self.store.paths()[-1])
    tables = table_files.tables_among(named)
    self.files.restore(found.path, found.arrays, tables)

  def assert_state(self, named, expected):
    self.assertEqual(set(named), set(expected))
    for name, value in expected.items():
      self.assertAllEqual(value, named[name].numpy(), name)

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

  @tiers.product(
    kind=tuple(map(tiers.smoke, _KINDS)),
    case=(tiers.smoke((2, 3, ())), (3, 1, (1,)), (1, 2, (0, 1, 2))),
  )
  def test_saved_and_restored_on_other_servers(self, kind, case):
    *servers, blind = case
    state = _STATES[kind]
    saved, loaded = (
      self.make(kind, servers[0], state),
      self.make(kind, servers[1]),
    )
    with self.blind(*blind):
      self.save(saved)
      self.restore(loaded)
    self.assert_state(loaded, state)
    # In one process, without servers.
    arrays = self.store.newest().arrays
    order = slice(None)
    if kind == 'row_table':
      order = np.argsort(arrays['table/ids'])
    for name, value in state.items():
      self.assertAllEqual(arrays[name][order], value)

  @parameterized.parameters(*_KINDS)
  def test_who_writes_and_reads(self, kind):
    """Checks that servers write and read blocks of their rows; the coordinator does
    so for blind ones, in smaller blocks.
    """
    seen = []

    def note(name):
      real = getattr(pieces, name)

      def call(*args):
        result = real(*args)
        rows = int((args[3] if name == 'write' else result).shape[0])
        seen.append((name, tf.constant(0).device[-1], rows))
        return result

      return mock.patch.object(pieces, name, call)

    table = self.make(kind, 3, _STATES[kind])
    for blind, largest in (
      ((), {'1': 25, '2': 25, '3': 25}),
      ((1,), {'1': 25, '0': 10, '3': 25}),
      ((0, 1, 2), {'0': 10}),
    ):
      seen.clear()
      with note('write'), note('read'), self.blind(*blind):
        self.save(table)
        self.restore(table)
      for name in ('write', 'read'):
        found = {}
        for what, device, rows in seen:
          if what == name:
            found[device] = max(rows, found.get(device, 0))
        if kind == 'variable':
          self.assertEqual(found, largest, (name, blind))
        else:  # The coordinator reads all blocks of these for a blind server.
          self.assertEqual(max(found.values()), max(largest.values()))

  @parameterized.parameters(*_KINDS)
  def test_what_was_lost_is_restored_with_the_rest(self, kind):
    state = _STATES[kind]
    named = self.make(kind, 2, state)
    path = self.save(named)
    for name, variable in named.items():
      value = state[name]
      variable.assign(value if 'ids' in name else value * 0 + 9)
    lost = self.shards(named)[1]
    lost.is_lost = True
    with self.assertRaisesRegex(
      errors.DataError, 'lost with parameter server 1'
    ):
      self.save(named)
    # A shard that could not be read stays lost.
    found = self.store.open(path)
    *_, table = found.arrays.specs.values()
    file = os.path.join(path, table.files()[-2])
    os.rename(file, file + '.away')
    with self.assertRaises(errors.DataError):
      self.restore(named)
    self.assertTrue(lost.is_lost)
    os.rename(file + '.away', file)
    self.restore(named)
    self.assertFalse(lost.is_lost)
    self.assert_state(named, state)

  @parameterized.parameters((), (0, 1, 2))
  def test_servers_find_damage(self, *blind):
    path = self.save(self.make('variable', 2, _VARIABLE))
    name = next(f for f in sorted(os.listdir(path)) if '.data' in f)
    with open(os.path.join(path, name), 'r+b') as f:
      f.write(b'\x01')
    loaded = self.make('variable', 2)
    with self.blind(*blind), self.assertRaises(errors.DataError):
      self.restore(loaded)
    self.assertAllEqual(loaded['table'].numpy(), _VARIABLE['table'] * 0)

  def test_small_variables_are_no_tables(self):
    rows = _VARIABLE['table']
    for value, is_table in ((rows, True), (rows[:20], False), (0.0, False)):
      named = {'w': local_servers.variable(0, value)}
      self.assertLen(table_files.tables_among(named), is_table)

  def test_a_large_table_that_is_read_whole_is_told(self):
    variable = keras.Variable(tf.zeros([1, _WIDTH]), name='users')
    table = partitioned.ServerTable(
      variable, dynamic_tables.first_rows, 2, lambda do: do()
    )
    with (
      mock.patch.object(
        row_updates, '_memory_bytes', lambda: 8 * (4 * 200 * _WIDTH - 1)
      ),
      self.assertWarnsRegex(
        errors.LargeTableWarning, "table 'users' of parameter servers, 0 MB"
      ),
    ):
      for column in table.columns():
        column.assign(_ROW_TABLE[f'table/{column.key}'])
      table.columns()[1].numpy()


if __name__ == '__main__':
  tf.test.main()
