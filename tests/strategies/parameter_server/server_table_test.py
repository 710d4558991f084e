"""DynamicEmbedding on servers: exact, moved, restored, expired."""

import functools
import itertools
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import dynamic_tables, parameter_servers
from tests.strategies.parameter_server import chief
from tf_strategies import errors

OPTIMIZERS = dynamic_tables.OPTIMIZERS
# Of the gradients of equal ids SGD is sent the sum, Adam all.
_SYNC = ('sgd', 'adam')
_UNKNOWN = np.array([[2**60, -5]])


def _build(strategy, optimizer='adam', is_dynamic=True, **options):
  with strategy.scope():
    return dynamic_tables.model(is_dynamic, OPTIMIZERS[optimizer], **options)


def _train(strategy, **options):
  """Returns the results of training, and reports of the table and the strategy."""
  try:
    model = _build(strategy, **options)
    layer = model.layers[0]
    found = dynamic_tables.results(model, *dynamic_tables.all_in_each_batch())
    found['unknown'] = layer(_UNKNOWN).numpy()
    model.predict(_UNKNOWN, verbose=0)
    found |= {'usage': layer.usage(), 'report': layer.report()}
    found['strategy'] = strategy.report()
    sharing = getattr(strategy.engine, '_sharing', {})
    found['whole'] = sum(
      isinstance(powers, str)
      for of in sharing.values()
      for powers in of.values()
    )
    return found
  finally:
    strategy.close()


def in_sync(directory):
  return {
    name: _train(tfs.ParameterServerStrategy(mode='sync'), optimizer=name)
    for name in _SYNC
  }


def of_gaps_in_sync(directory):
  found = {}
  for kind in ('ragged', 'sparse'):
    strategy = tfs.ParameterServerStrategy(mode='sync')
    x, y = dynamic_tables.all_in_each_batch()
    model = _build(strategy, kind=kind)
    data = dynamic_tables.with_gaps(kind, x), y
    found[kind] = dynamic_tables.results(model, *data)
    strategy.close()
  return found


def in_async_on_one_worker(directory):
  return _train(tfs.ParameterServerStrategy(), steps_per_execution=5)


def in_control_flow(directory):
  """Returns the errors for a table that is updated in a branch or in a loop."""
  found = {}
  for mode, kind in itertools.product(_MODES, _CONTROL_FLOW):
    wrap = _CONTROL_FLOW[kind]
    strategy = tfs.ParameterServerStrategy(mode=mode)
    with strategy.scope():
      layer, optimizer, step = dynamic_tables.twice(True)
    remote = strategy.step(functools.partial(wrap, step), [optimizer])
    try:
      remote(next(iter(dynamic_tables.pairs())))
    except errors.UnsupportedOptionError as e:
      found[mode, kind] = str(e), layer.report()['rows']
    strategy.close()
  return found


def _in_branch(step, batch):
  return tf.cond(tf.size(batch[1]) > 0, lambda: step(batch), lambda: 0.0)


def _in_loop(step, batch):
  def again(i, loss):
    del loss
    return i + 1, step(batch)

  return tf.while_loop(lambda i, _: i < 3, again, [0, 0.0])[1]


_CONTROL_FLOW = {'branch': _in_branch, 'loop': _in_loop}
_MODES = 'async', 'sync'


def in_other_modes(directory):
  return {
    name: _train(tfs.ParameterServerStrategy(**options), **more)
    for name, options, more in (
      ('async', {}, {}),
      ('bounded', {'mode': 'bounded', 'max_staleness': 1}, {}),
      ('backup', {'mode': 'sync', 'backup_workers': 1}, {}),
    )
  }


def save(directory):
  """Trains an epoch, saves in all ways, and trains another."""
  strategy = _saving(directory)
  model = _build(strategy)
  data = dynamic_tables.all_in_each_batch()
  run = tfs.Run(_run_directory(directory), model)
  dynamic_tables.results(model, *data, epochs=1, callbacks=[run])
  model.save(os.path.join(directory, 'model.keras'))
  usage = model.layers[0].usage()
  refused, state = [], _state(model)
  path = os.path.join(directory, 'refused')
  for action in (
    lambda: tf.train.Checkpoint(model=model).save(path),
    lambda: model.export(path, verbose=False),
  ):
    try:
      action()
    except errors.UnsupportedOptionError as e:
      refused.append(str(e))
  found = _second_epoch(model), usage, refused, state
  strategy.close()
  return found


def _state(model):
  """Returns the ids, rows and optimizer slots of the table, sorted by ids."""
  table = model.layers[0]._table
  columns = [*table.columns(), *table.slot_columns()]
  return {column.key: column.numpy() for column in columns}


def _saving(directory):
  return tfs.ParameterServerStrategy(
    mode='sync', checkpoint_dir=_run_directory(directory)
  )


def _run_directory(directory):
  return os.path.join(directory, 'run')


def _second_epoch(model, **options):
  x, y = dynamic_tables.some_in_each_batch()
  return dynamic_tables.results(model, x, y, **options)


def load(directory):
  strategy = tfs.ParameterServerStrategy(mode='sync')
  with strategy.scope():
    model = keras.models.load_model(os.path.join(directory, 'model.keras'))
  usage, report = model.layers[0].usage(), model.layers[0].report()
  state = _state(model)
  found = _second_epoch(model), usage, report, state
  strategy.close()
  return found


def continue_checkpoint(directory):
  """Continues a checkpoint on other data; returns the results and the loaded state."""
  # Whoever wants that has to say so.
  os.remove(os.path.join(directory, 'run', 'owner.json'))
  strategy = _saving(directory)
  model = _build(strategy)
  x, y = dynamic_tables.some_in_each_batch()
  states = []
  look = keras.callbacks.LambdaCallback(
    on_train_begin=lambda logs: states.append(_state(model))
  )
  # The first epoch is done, so these are the second and the third.
  history = model.fit(
    dynamic_tables.dataset(x, y),
    epochs=3,
    verbose=0,
    callbacks=[tfs.Run(_run_directory(directory), model), look],
  )
  found = {
    'losses': history.history['loss'],
    'predictions': model.predict(dynamic_tables.dataset(x, y), verbose=0),
  }
  report = model.layers[0].report()
  strategy.close()
  return found, report, states[0]


def expire(directory):
  strategy = tfs.ParameterServerStrategy(mode='sync')
  model = _build(strategy)
  layer = model.layers[0]
  x = np.array([[1, 1], [2, 3], [4, 1], [5, 4]])
  model.fit(x, np.ones([4, 1]), batch_size=1, shuffle=False, verbose=0)
  found = [layer.expire(max_age=1, min_uses=2), layer.usage()['ids'].tolist()]
  found += [layer.expire(max_age=0), layer.expire(min_uses=2), layer.report()]
  found.append(layer(np.array([2])).numpy())
  strategy.close()
  return found


class _ServersTest(parameterized.TestCase, tf.test.TestCase):
  on_two_servers = on_three_servers = ()

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if not cls.on_two_servers:
      return
    cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    with parameter_servers.Job(num_workers=2, num_ps=2) as job:
      cls.found = cls._run(job, cls.on_two_servers)
    if cls.on_three_servers:
      with parameter_servers.Job(num_workers=1, num_ps=3) as job:
        cls.moved = cls._run(job, cls.on_three_servers)

  @classmethod
  def _run(cls, job, programs):
    programs = {p.__name__: p for p in programs}
    return chief.Programs(job, programs, (cls.directory,))

  def assert_results(self, expected, actual):
    for name, value in expected.items():
      self.assertAllClose(value, actual[name], 0, 1e-6, name)

  def assert_as_embedding(self, optimizer, found):
    static = dynamic_tables.model(False, OPTIMIZERS[optimizer])
    data = dynamic_tables.all_in_each_batch()
    self.assert_results(dynamic_tables.results(static, *data), found)
    self.assertEqual(found['whole'], 0, 'one worker computed all')
    self.assert_counts(found)

  def assert_counts(self, found):
    """Checks that each id counts once a step, and that both servers have ids."""
    x, _ = dynamic_tables.all_in_each_batch()
    ids, counts = np.unique(x, return_counts=True)
    self.assertAllEqual(found['usage']['ids'], ids)
    self.assertAllEqual(found['usage']['uses'], 2 * counts)
    self.assertEqual(sum(found['report']['by_shard']), len(ids))
    self.assertNotIn(0, found['report']['by_shard'])
    self.assertAllClose(
      found['unknown'][0], dynamic_tables.first_rows(_UNKNOWN[0])
    )


class TrainingTest(_ServersTest):
  on_two_servers = (
    in_sync,
    in_other_modes,
    of_gaps_in_sync,
    save,
    expire,
  )
  on_three_servers = (
    load,
    continue_checkpoint,
    in_async_on_one_worker,
    in_control_flow,
  )

  @parameterized.parameters(*_SYNC)
  def test_sync_equals_embedding_on_one_device(self, name):
    self.assert_as_embedding(name, self.found['in_sync'][name])

  @parameterized.parameters('ragged', 'sparse')
  def test_ragged_and_sparse_ids_equal_embedding(self, kind):
    static = dynamic_tables.model(False, OPTIMIZERS['adam'], kind)
    x, y = dynamic_tables.all_in_each_batch()
    x = dynamic_tables.with_gaps(kind, x)
    expected = dynamic_tables.results(static, x, y)
    self.assert_results(expected, self.found['of_gaps_in_sync'][kind])

  def test_async_equals_embedding_with_one_worker(self):
    found = self.moved['in_async_on_one_worker']
    static = dynamic_tables.model(False, OPTIMIZERS['adam'])
    data = dynamic_tables.all_in_each_batch()
    expected = dynamic_tables.results(static, *data)
    del expected[
      'losses'
    ]  # Logs of an asynchronous step are of an earlier one.
    self.assert_results(expected, found)
    self.assert_counts(found)

  @parameterized.product(mode=_MODES, kind=('branch', 'loop'))
  def test_updates_in_control_flow_are_refused(self, mode, kind):
    message, rows = self.moved['in_control_flow'][mode, kind]
    self.assertRegex(message, 'dynamic table .* in a branch, in a loop')
    self.assertEqual(rows, 0)

  @parameterized.parameters('async', 'bounded')
  def test_no_update_is_lost_or_repeated(self, mode):
    self.assert_counts(self.found['in_other_modes'][mode])

  def test_dropped_shares_are_not_counted(self):
    found = self.found['in_other_modes']['backup']
    x, _ = dynamic_tables.all_in_each_batch()
    total = 2 * x.size
    rows = 4 * found['strategy']['dropped']  # Half of a batch of 8 each.
    self.assertEqual(found['usage']['uses'].sum(), total - 2 * rows)

  def test_a_file_of_two_servers_loads_onto_three(self):
    expected, usage, _, state = self.found['save']
    found, then, report, moved = self.moved['load']
    self.assert_state(state, moved)
    self.assert_results(expected, found)
    self.assert_usage(usage, then)
    self.assertLen(report['by_shard'], 3)
    self.assertEqual(sum(report['by_shard']), len(usage['ids']))
    self.assertGreater(np.count_nonzero(report['by_shard']), 1)

  def assert_state(self, expected, actual):
    """Checks bit by bit that three servers loaded the state of two."""
    self.assertEqual(
      set(expected), {'ids', 'rows', 'Adam.momentums', 'Adam.velocities'}
    )
    self.assertEqual(set(expected), set(actual))
    for key, value in expected.items():
      self.assertAllEqual(value, actual[key])
      self.assertGreater(len(np.unique(value)), 5, key)

  def assert_usage(self, expected, actual):
    for name, value in expected.items():
      self.assertAllEqual(value, actual[name])

  def test_a_file_of_two_servers_loads_onto_one_device(self):
    expected, usage, _, _ = self.found['save']
    path = os.path.join(self.directory, 'model.keras')
    self.assertIsNotNone(tfs.keras)  # Registers the layer.
    model = keras.models.load_model(path)
    self.assert_usage(usage, model.layers[0].usage())
    self.assert_results(expected, _second_epoch(model))

  def test_what_would_leave_out_rows_is_refused(self):
    _, _, (checkpoint, export), _ = self.found['save']
    self.assertIn('use checkpoint_dir of the strategy', checkpoint)
    self.assertRegex(
      export, r"model.export.*load_model\('model.keras'\).export"
    )

  def test_a_checkpoint_of_two_servers_goes_on_on_three(self):
    expected, _, _, state = self.found['save']
    found, report, moved = self.moved['continue_checkpoint']
    self.assert_state(state, moved)
    self.assertAllClose(expected['losses'], found['losses'], 0, 1e-6)
    self.assertAllClose(expected['predictions'], found['predictions'], 0, 1e-6)
    self.assertLen(report['by_shard'], 3)

  def test_an_evaluator_on_one_device_reads_its_rows(self):
    model = dynamic_tables.model(True, OPTIMIZERS['adam'])
    data = dynamic_tables.dataset(*dynamic_tables.some_in_each_batch())
    directory = os.path.join(self.directory, 'run')
    tfs.SidecarEvaluator(model, data, directory, idle_timeout_seconds=1).run()
    found, _, _ = self.moved['continue_checkpoint']
    self.assertAllClose(
      found['predictions'], model.predict(data, verbose=0), 0, 1e-6
    )

  def test_expires(self):
    old_and_rare, left, old, rare, report, row = self.found['expire']
    self.assertEqual((old_and_rare, left), (2, [1, 4, 5]))
    self.assertEqual((old, rare), (1, 1))
    self.assertEqual((report['rows'], report['expired']), (1, 4))
    self.assertAllClose(row, dynamic_tables.first_rows([2]))


if __name__ == '__main__':
  tf.test.main()
