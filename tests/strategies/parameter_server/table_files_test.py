"""Tables of both kinds go between servers and files, in blocks."""

import contextlib
import os
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import dynamic_tables, parameter_servers, tiers
from tests.strategies.parameter_server import local_servers
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer, pieces
from tf_strategies.keras import row_table, row_updates
from tf_strategies.strategies.parameter_server import (
  server_table,
  table_files,
)

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
    server_table.ServerShard(i, 'table', _WIDTH, dynamic_tables.first_rows)
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
    servers=((2, 3), (3, 1), (1, 2)),
    blind=((), (1,), (0, 1, 2)),
  )
  def test_saved_and_restored_on_other_servers(self, kind, servers, blind):
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

  @parameterized.named_parameters(
    ('rows_of_others', 'row_table', row_table.RowTable, 'owner',
     lambda self, ids: tf.zeros_like(ids, tf.int32)),
    ('first_rows_everywhere', 'variable', pieces, 'rows_of',
     lambda path, table, first, *others, real=pieces.rows_of: real(
       path, table, 0, *others)),
  )  # fmt: skip
  def test_mutations_are_seen(self, kind, owner, name, mutation):
    state = _STATES[kind]
    saved, loaded = self.make(kind, 2, state), self.make(kind, 3)
    with mock.patch.object(owner, name, mutation):
      self.save(saved)
      self.restore(loaded)
    with self.assertRaises(AssertionError):
      self.assert_state(loaded, state)

  def test_who_writes(self):
    """Checks that servers write their rows; the coordinator writes for blind ones."""
    devices = []
    write = pieces.write

    def note(directory, file, first, rows):
      devices.append((tf.constant(0).device[-1], first, int(rows.shape[0])))
      return write(directory, file, first, rows)

    table = self.make('variable', 2, _VARIABLE)
    with mock.patch.object(pieces, 'write', note), self.blind(1):
      self.save(table)
    by_device = {d: [w[1:] for w in devices if w[0] == d] for d, *_ in devices}
    self.assertEqual(set(by_device), {'1', '0'})
    self.assertEqual(by_device['1'], [(b, 25) for b in range(0, 100, 25)])
    self.assertEqual(by_device['0'], [(b, 10) for b in range(100, 200, 10)])

  @parameterized.product(kind=_KINDS, case=((0, 25), (1, 25), (3, 10)))
  def test_nobody_holds_more_than_a_block(self, kind, case):
    blind, most = case
    table, loaded = self.make(kind, 2, _STATES[kind]), self.make(kind, 3)
    largest = {}

    def note(name):
      real = getattr(pieces, name)

      def call(*args):
        result = real(*args)
        rows = int((args[3] if name == 'write' else result).shape[0])
        largest[name] = max(largest.get(name, 0), rows)
        return result

      return mock.patch.object(pieces, name, call)

    with note('write'), note('read'), self.blind(*range(blind)):
      self.save(table)
      self.restore(loaded)
    self.assertEqual(largest, {'write': most, 'read': most})

  @parameterized.parameters(*_KINDS)
  def test_what_was_lost_is_restored_with_the_rest(self, kind):
    state = _STATES[kind]
    named = self.make(kind, 2, state)
    self.save(named)
    others = {
      name: value if 'ids' in name else value * 0 + 9
      for name, value in state.items()
    }
    for name, variable in named.items():
      variable.assign(others[name])
    self.shards(named)[1].is_lost = True
    with self.assertRaisesRegex(
      errors.DataError, 'lost with parameter server 1'
    ):
      self.save(named)
    self.restore(named)
    self.assertFalse(self.shards(named)[1].is_lost)
    for name, value in state.items():
      self.assertAllEqual(named[name].numpy(), value)

  @parameterized.parameters(*_KINDS)
  def test_a_shard_that_could_not_be_read_stays_lost(self, kind):
    named = self.make(kind, 2, _STATES[kind])
    path = self.save(named)
    self.shards(named)[1].is_lost = True
    found = self.store.open(path)
    *_, table = found.arrays.specs.values()
    os.remove(os.path.join(path, table.files()[-2]))
    tables = table_files.tables_among(named)
    with self.assertRaises(errors.DataError):
      self.files.restore(path, found.arrays, tables)
    self.assertTrue(self.shards(named)[1].is_lost)

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
    for value, is_table in (
      (rows, True),
      (rows[:20], False),
      (0.0, False),
    ):
      named = {'w': local_servers.variable(0, value)}
      self.assertLen(table_files.tables_among(named), is_table)

  def test_a_large_table_that_is_read_whole_is_told(self):
    variable = keras.Variable(tf.zeros([1, _WIDTH]), name='users')
    table = server_table.ServerTable(
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

  def test_an_empty_table(self):
    loaded = self.make('row_table', 3)
    nothing = {name: v[:0] for name, v in _ROW_TABLE.items()}
    self.save(self.make('row_table', 2, nothing))
    self.restore(loaded)
    self.assertEmpty(loaded['table/ids'].numpy())


_ROWS = 1_000_000
_LARGE_WIDTH = 16
_STEP_ROWS = 20_000


def without_servers(directory):
  """The same, if no server sees the directory."""
  nobody = lambda *unused: frozenset()  # noqa: E731
  with mock.patch.object(table_files.TableFiles, '_servers_that_see', nobody):
    return save_and_load_many(directory)


def save_and_load_many(directory):
  """Measures the memory that the coordinator needs to save, load and read a table."""
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
  strategy.save()  # Makes the objects that stay.
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
  """Returns the most bytes that this process grows by during an action."""
  with open('/proc/self/clear_refs', 'w') as f:
    f.write('5')  # Resets the peak to the present size.
  before = _peak()
  action()
  return _peak() - before


def _peak():
  with open('/proc/self/status') as f:
    line = next(line for line in f if line.startswith('VmHWM:'))
  return 1024 * int(line.split()[1])


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
