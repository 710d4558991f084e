"""DynamicEmbedding on servers is exact, and can be moved, restored and expired."""

import contextlib
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import dynamic_tables, tf_case
from tests.programs import runner
from tests.strategies.parameter_server import chief
from tf_strategies import errors

_UNKNOWN = np.array([[2**60, -5]])
_IN_SYNC = {'dense': 'adam', 'ragged': 'adam', 'sparse': 'sgd'}


def _build(strategy, optimizer='adam', **options):
  with strategy.scope():
    return dynamic_tables.model(
      True, dynamic_tables.OPTIMIZERS[optimizer], **options
    )


def _data(kind='dense'):
  x, y = dynamic_tables.all_in_each_batch()
  return x if kind == 'dense' else dynamic_tables.with_gaps(kind, x), y


def _train(strategy, optimizer='adam', kind='dense', **options):
  """Returns the results of training, and reports of the table and the strategy."""
  with contextlib.closing(strategy):
    model = _build(strategy, optimizer, kind=kind, **options)
    layer = model.layers[0]
    found = dynamic_tables.results(model, *_data(kind))
    found['unknown'] = layer(_UNKNOWN).numpy()
    if kind == 'dense':
      model.predict(_UNKNOWN, verbose=0)
    found |= {'usage': layer.usage(), 'report': layer.report()}
    # One worker computes batches of ragged or sparse tensors.
    if strategy.options.mode == 'sync' and kind == 'dense':
      assert runner.shares_rows(strategy)
    return found


def in_sync(directory):
  return {
    kind: _train(tfs.ParameterServerStrategy(mode='sync'), optimizer, kind)
    for kind, optimizer in _IN_SYNC.items()
  }


def in_async_on_one_worker(directory):
  return _train(tfs.ParameterServerStrategy(), 'sgd', steps_per_execution=5)


def in_control_flow(directory):
  """Returns the errors for a table that is updated in a branch."""
  found = []
  for mode in ('async', 'sync'):
    strategy = tfs.ParameterServerStrategy(mode=mode)
    with strategy.scope():
      layer, optimizer, step = dynamic_tables.twice(True)

    def in_branch(batch, step=step):
      return tf.cond(tf.size(batch[1]) > 0, lambda: step(batch), lambda: 0.0)

    try:
      strategy.step(in_branch, [optimizer])(dynamic_tables.pairs()[0])
    except errors.UnsupportedOptionError as e:
      found.append((str(e), layer.report()['rows']))
    strategy.close()
  return found


def save(directory):
  """Trains an epoch, saves in all formats, and trains another epoch."""
  run_directory = os.path.join(directory, 'run')
  strategy = tfs.ParameterServerStrategy(
    mode='sync', checkpoint_dir=run_directory
  )
  model = _build(strategy)
  run = tfs.Run(run_directory, model)
  dynamic_tables.results(model, *_data(), epochs=1, callbacks=[run])
  model.save(os.path.join(directory, 'model.keras'))
  usage, state = model.layers[0].usage(), _state(model)
  refused, path = [], os.path.join(directory, 'refused')
  for action in (
    lambda: tf.train.Checkpoint(model=model).save(path),
    lambda: model.export(path, verbose=False),
  ):
    try:
      action()
    except errors.UnsupportedOptionError as e:
      refused.append(str(e))
  found = _second_epoch(model), usage, state, refused
  strategy.save()
  strategy.close()
  return found


def _state(model):
  """Returns the ids, rows and optimizer slots of the table, sorted by ids."""
  table = model.layers[0]._table
  columns = [*table.columns(), *table.slot_columns()]
  return {column.key: column.numpy() for column in columns}


def _second_epoch(model):
  return dynamic_tables.results(model, *dynamic_tables.some_in_each_batch())


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


class ServerTableTest(tf_case.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.found = cls._run(2, in_sync, save, expire)
    cls.alone = cls._run(1, in_async_on_one_worker, in_control_flow)

  @classmethod
  def _run(cls, num_workers, *programs):
    programs = {p.__name__: p for p in programs}
    return chief.Programs(programs, [cls.directory], num_workers)

  def assert_as_embedding(self, found, optimizer, kind='dense'):
    make = dynamic_tables.OPTIMIZERS[optimizer]
    static = dynamic_tables.model(False, make, kind)
    expected = dynamic_tables.results(static, *_data(kind))
    for name in found.keys() & expected.keys():
      self.assertAllClose(expected[name], found[name], 0, 1e-6, name)

  def assert_counts(self, found):
    """Checks that each id counts once per step, and that all servers have ids."""
    x, _ = _data()
    ids = np.unique(x)
    self.assertAllEqual(found['usage']['ids'], ids)
    self.assertAllEqual(
      found['usage']['uses'], [2 * dynamic_tables.STEPS] * len(ids)
    )
    self.assertEqual(sum(found['report']['by_shard']), len(ids))
    self.assertNotIn(0, found['report']['by_shard'])
    self.assertAllClose(
      found['unknown'][0], dynamic_tables.first_rows(_UNKNOWN[0])
    )

  @parameterized.parameters(*_IN_SYNC)
  def test_sync_equals_embedding_on_one_device(self, kind):
    found = self.found['in_sync'][kind]
    self.assert_as_embedding(found, _IN_SYNC[kind], kind)
    if kind == 'dense':
      self.assert_counts(found)

  def test_async_equals_embedding_with_one_worker(self):
    found = self.alone['in_async_on_one_worker']
    del found['losses']  # Asynchronous steps log the values of earlier steps.
    self.assert_as_embedding(found, 'sgd')
    self.assert_counts(found)

  def test_updates_in_control_flow_are_refused(self):
    found = self.alone['in_control_flow']
    self.assertLen(found, 2)
    for message, rows in found:
      self.assertRegex(message, 'dynamic table .* the step does not know')
      self.assertEqual(rows, 0)

  def test_model_saved_from_servers_loads_on_one_device(self):
    expected, usage, state, *_ = self.found['save']
    path = os.path.join(self.directory, 'model.keras')
    self.assertIsNotNone(tfs.keras)  # Registers the layer.
    model = keras.models.load_model(path)
    self.assertEqual(
      set(state), {'ids', 'rows', 'Adam.momentums', 'Adam.velocities'}
    )
    self.assertGreater(min(len(np.unique(v)) for v in state.values()), 5)
    self.assertAllClose(state, _state(model), 0, 0)
    self.assertAllClose(usage, model.layers[0].usage(), 0, 0)
    self.assertAllClose(expected, _second_epoch(model), 0, 1e-6)

  def test_saving_without_dynamic_rows_is_refused(self):
    *_, (checkpoint, export) = self.found['save']
    self.assertIn('use checkpoint_dir of the strategy', checkpoint)
    self.assertRegex(
      export, r"model.export.*load_model\('model.keras'\).export"
    )

  def test_evaluator_on_one_device_restores_rows(self):
    model = dynamic_tables.model(True, dynamic_tables.OPTIMIZERS['adam'])
    data = dynamic_tables.dataset(*dynamic_tables.some_in_each_batch())
    directory = os.path.join(self.directory, 'run')
    tfs.SidecarEvaluator(model, data, directory, idle_timeout_seconds=1).run()
    expected, *_ = self.found['save']
    self.assertAllClose(
      expected['predictions'], model.predict(data, verbose=0), 0, 1e-6
    )

  def test_expire_removes_old_and_rare_rows(self):
    old_and_rare, left, old, rare, report, row = self.found['expire']
    self.assertEqual((old_and_rare, left), (2, [1, 4, 5]))
    self.assertEqual((old, rare), (1, 1))
    self.assertEqual((report['rows'], report['expired']), (1, 4))
    self.assertAllClose(row, dynamic_tables.first_rows([2]))


if __name__ == '__main__':
  tf.test.main()
