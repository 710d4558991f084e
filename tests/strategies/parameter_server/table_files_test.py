"""Tables of both kinds are saved and restored in blocks."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import dynamic_tables, tiers
from tests.strategies.parameter_server import local_servers
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer
from tf_strategies.keras.tables import row_table
from tf_strategies.strategies.parameter_server import partitioned, table_files

_WIDTH = dynamic_tables.WIDTH
# Distinct rows of a variable, and of a table without a vocabulary.
_VARIABLE = {
  'table': np.arange(200 * (_WIDTH + 2), dtype=np.float32).reshape(200, -1)
}
_ROW_TABLE = {
  'table/ids': np.arange(-100, 100) * 2**40 + 3,
  'table/rows': _VARIABLE['table'] + 1,
  'table/Adam.m': -np.arange(200.0 * (_WIDTH + 1)).reshape([200, -1]) - 1,
}
_STATES = {'variable': _VARIABLE, 'row_table': _ROW_TABLE}
_OTHER_STATES = {
  'variable': {'table': _VARIABLE['table'] * 0},
  'row_table': {
    **{name: v[::2] * 0 + 9 for name, v in _ROW_TABLE.items()},
    'table/ids': np.arange(100),
  },
}
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


class TableFilesTest(local_servers.LocalServersTestCase):
  def setUp(self):
    super().setUp()
    # Blocks of 10 rows.
    for name, size in (('_TABLE_BYTES', 1000), ('_BLOCK_BYTES', 240)):
      self.enter_context(mock.patch.object(table_files, name, size))
    self.store = checkpointer.Checkpointer(self.directory)

  def make(self, kind, servers, states=_STATES):
    """Returns the objects to save, by name: a table with these rows."""
    value = states[kind]
    if kind == 'variable':
      return {'table': _make_variable(servers, value)}
    return _columns(_make_row_table(servers, value))

  def save(self, named):
    return self.store.save(table_files.arrays_of(named), {})

  def restore(self, named):
    table_files.restore(self.store.newest().arrays, named)

  def assert_state(self, named, expected):
    self.assertEqual(set(named), set(expected))
    for name, value in expected.items():
      self.assertAllEqual(value, named[name].numpy(), name)

  @tiers.product(
    kind=tuple(map(tiers.smoke, _KINDS)),
    servers=(tiers.smoke((2, 3)), (3, 1), (1, 2)),
  )
  def test_saved_and_restored_on_other_servers(self, kind, servers):
    state = _STATES[kind]
    self.save(self.make(kind, servers[0]))
    loaded = self.make(kind, servers[1], _OTHER_STATES)
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
  def test_save_and_restore_hold_one_block_in_memory(self, kind):
    table = self.make(kind, 3)
    for _, array in table_files.arrays_of(table):
      sizes = [block.nbytes for block in array.blocks]
      self.assertGreater(len(sizes), 5)
      self.assertLessEqual(max(sizes), 240)
    self.save(table)
    read = []
    rows = checkpointer.StoredArrays.rows

    def note(arrays, name, *args):
      found = rows(arrays, name, *args)
      if not name.endswith('ids'):  # Ids take eight bytes per row.
        read.append(found)
      return found

    with mock.patch.object(checkpointer.StoredArrays, 'rows', note):
      self.restore(table)
    self.assertLessEqual(max(array.nbytes for array in read), 240)
    self.assert_state(table, _STATES[kind])

  @parameterized.parameters(*_KINDS)
  def test_lost_part_is_restored_with_the_rest(self, kind):
    state = _STATES[kind]
    named = self.make(kind, 2)
    path = self.save(named)
    for name, variable in named.items():
      value = state[name]
      variable.assign(value if 'ids' in name else value * 0 + 9)
    first = next(iter(named.values()))
    # The rows on server 1.
    lost = (first.parts if kind == 'variable' else first.table.shards)[1]
    lost.is_lost = True
    with self.assertRaisesRegex(
      errors.DataError, 'lost with parameter server 1'
    ):
      self.save(named)
    self.assertEqual(self.store.paths(), [path])
    self.restore(named)
    self.assertFalse(lost.is_lost)
    self.assert_state(named, state)


if __name__ == '__main__':
  tf.test.main()
