"""What `fit` tables do not show: state, reductions and loops over workers."""

import functools
import gc
import os
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tests.conformance import dropout_test, harness, multi_worker
from tests.conformance.harness import Feature
from tests.conformance.multi_worker import WorkerCase

# A minute and a half on two quiet cores.
_DEADLINE_SECONDS = 280

CASES = (
  WorkerCase('collective_2x1', 'multi_worker_collective', 2, devices=1),
  WorkerCase('ring_2x1', 'multi_worker_ring', workers=2, devices=1),
  WorkerCase('ring_2x1_unlike', 'multi_worker_ring', 2, 1, are_unlike=True),
  WorkerCase('ring_2x2', 'multi_worker_ring', workers=2, devices=2),
)
_SOAK = os.environ.get('TFS_SOAK') == '1'
# The others are between the last and what TensorFlow's own runtime does.
_EVERY = (
  *tiers.every(tiers.soak, [(case.name, case) for case in CASES[:-1]]),
  (CASES[-1].name, CASES[-1]),
)
_COMPRESSED_CASE = CASES[-1]

_COMPRESSIONS = ('bfloat16', 'float16')
_DTYPES = ('float32', 'float64', 'int32', 'int64', 'bfloat16')


# What each worker does, under one strategy. The results are pickled.


def _values(v):
  """The components of a variable or distributed value, as arrays."""
  parts = getattr(v, 'values', None)
  if parts is None:
    parts = [v]
  return [np.asarray(tf.convert_to_tensor(p)) for p in parts]


def _plain_bn_model():
  return harness.conv_model(keras.layers.BatchNormalization(momentum=0.5))


def _statistics_model():
  return keras.Sequential(
    [
      keras.layers.Input([1]),
      keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False),
      keras.layers.Dense(1),
    ]
  )


_STATISTICS = Feature(
  'statistics', model=_statistics_model, compile={'loss': 'mse', 'metrics': []}
)


def _part(replica_id, replicas):
  """Rows of one replica, of a mean and a variance of their own."""
  rows = np.linspace(-1, 1, 32 // replicas)
  return 10.0 * replica_id + (replica_id + 1) * rows


def _statistics(strategy):
  n = strategy.num_replicas_in_sync
  x = np.concatenate([_part(i, n) for i in range(n)]).astype(np.float32)
  results = []
  for rows in (x[:, None], np.array([[6.0]], np.float32)):
    model = harness.build(_STATISTICS, strategy)
    model.fit(rows, rows, batch_size=32, epochs=1, shuffle=False, verbose=0)
    layer = model.layers[0]
    results.append(
      [_values(v.value) for v in (layer.moving_mean, layer.moving_variance)]
    )
  return results


def _plain_bn(strategy):
  feature = Feature('plain', rows=65, model=_plain_bn_model)
  result = harness.train(feature, strategy, epochs=2)
  return result.weights, result.predictions, result.history['loss']


def _loss_scale(strategy):
  """A finite step, then one in which a single replica has an inf."""
  results = []
  for bad_row in (0, 7):
    keras.backend.clear_session()
    with strategy.scope():
      ones = keras.layers.Dense(1, use_bias=False, kernel_initializer='ones')
      model = keras.Sequential([keras.layers.Input([1]), ones])
      optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=8.0
      )
      model.compile(optimizer, 'mse')
    x = np.full([8, 1], 0.5, np.float32)
    found = []
    for value in (0.5, np.inf):
      x[bad_row] = value
      y = np.zeros([8, 1], np.float32)
      model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
      scale = _values(optimizer.dynamic_scale.value)
      found.append((model.get_weights()[0].item(), np.unique(scale).tolist()))
    results.append(found)
  return results


def _dropout(strategy):
  with strategy.scope():
    layer = dropout_test.Mask()
    layer(tf.ones([1, 64]))

  @tf.function
  def draw():
    return strategy.run(lambda: layer(tf.ones([1, 64]), training=True))

  masks = [
    [np.asarray(v) for v in strategy.experimental_local_results(draw())]
    for _ in range(2)
  ]
  return masks, _values(layer.dropout.seed_generator.state.value)


def _tokens():
  """Token ids with duplicates in a row, in a worker and across workers."""
  return np.array([[0, 0], [1, 5], [0, 1], [7, 5]], np.int32)


def _embedding(strategy):
  """The summed gradient of each replica's rows: token t in row r adds r + 1."""
  table = tf.ones([9, 2])
  weights = tf.range(1.0, 5.0)
  batches = tf.data.Dataset.from_tensor_slices((_tokens(), weights)).batch(4)

  def replica_fn(ids, weights):
    with tf.GradientTape() as tape:
      tape.watch(table)
      rows = tf.gather(table, ids)
      loss = tf.reduce_sum(rows * weights[:, None, None])
    slices = tape.gradient(loss, table)
    assert isinstance(slices, tf.IndexedSlices), slices
    context = tf.distribute.get_replica_context()
    return tf.convert_to_tensor(context.all_reduce('SUM', slices))

  @tf.function
  def step(ids, weights):
    return strategy.run(replica_fn, args=(ids, weights))

  [batch] = strategy.experimental_distribute_dataset(batches)
  return [
    np.asarray(v) for v in strategy.experimental_local_results(step(*batch))
  ]


def _predict_model():
  model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2)])
  kernel = np.arange(6, dtype=np.float32).reshape([3, 2])
  model.set_weights([kernel, np.float32([1, 2])])
  return model


def _rows(rows):
  return np.arange(3 * rows, dtype=np.float32).reshape([rows, 3])


def _predict(strategy):
  with strategy.scope():
    model = _predict_model()
    model.compile('sgd', 'mse')
  return {
    rows: model.predict(_rows(rows), batch_size=8, verbose=0)
    for rows in (24, 21, 17, 1)
  }


def _per_replica(strategy, make):
  """One value a replica, made by `make(replica_id)`."""

  def replica_fn():
    context = tf.distribute.get_replica_context()
    return make(tf.cast(context.replica_id_in_sync_group, tf.int32))

  return strategy.run(replica_fn)


def _gather(strategy):
  long = _per_replica(strategy, lambda i: tf.fill([1 + i, 2], i))
  wide = _per_replica(strategy, lambda i: tf.fill([2, 1 + i], i))
  return strategy.gather(long, 0).numpy(), strategy.gather(wide, 1).numpy()


def _reduce(strategy):
  found = {}
  for dtype in _DTYPES:
    value = _per_replica(
      strategy, lambda i, t=dtype: tf.cast(10 * i + tf.range(3), t)
    )
    for op in ('SUM', 'MEAN'):
      result = strategy.reduce(op, value, axis=None)
      numbers = tf.cast(result, tf.float64).numpy().tolist()
      found[dtype, op] = result.dtype.name, numbers
  value = _per_replica(strategy, lambda i: tf.fill([2], i > 0))
  try:
    found['bool'] = str(strategy.reduce('SUM', value, axis=None))
  except tfs.errors.UnsupportedOptionError as e:
    found['bool'] = f'{type(e).__name__}: {e}'
  return found


def _compiled(strategy, model, optimizer='sgd', **options):
  with harness.scope_of(strategy):
    model.compile(optimizer, 'mse', metrics=['mae'], **options)
  return model


def _targets(rows):
  return _rows(rows)[:, :2] / (3 * rows)


def _fit(model, **options):
  x = _rows(21) / 63
  options = {'batch_size': 8, 'shuffle': False, 'verbose': 0, **options}
  return model.fit(x, _targets(21), **options).history


def _drop_on_some(strategy, models):
  """Leaves the first worker its models; the others' are gone when it returns."""
  if strategy is not None and strategy.rank:
    models.clear()
    keras.backend.clear_session()
    gc.collect()


def _eager_after_others(strategy):
  """An eager `fit` after models that some workers have dropped.

  Its step updates two metrics that the model does not know: one of them in a
  function, which runs no Python in later steps.
  """
  with harness.scope_of(strategy):
    models = [_compiled(strategy, _predict_model()) for _ in range(2)]
    outside, inside = keras.metrics.Sum(), keras.metrics.Sum()
  for model in models:
    _fit(model)
  del model
  _drop_on_some(strategy, models)

  @tf.function
  def count(x):
    inside.update_state(x)

  class Own(keras.Sequential):
    def train_step(self, data):
      outside.update_state(data[0])
      count(data[0])
      return super().train_step(data)

  with harness.scope_of(strategy):
    model = Own(_predict_model().layers)
  _compiled(strategy, model, run_eagerly=True)
  history = _fit(model, epochs=2)
  totals = [metric.result().numpy().item() for metric in (outside, inside)]
  evaluation = model.evaluate(
    _rows(17), _targets(17), batch_size=8, verbose=0, return_dict=True
  )
  predictions = model.predict(_rows(17), batch_size=8, verbose=0)
  return model.get_weights(), history, totals, evaluation, predictions


def _meetings(strategy):
  """Weights before and after `evaluate`, beside models that trained apart."""

  def train_apart():
    with strategy.scope():
      model = _predict_model()
      optimizer = tfs.keras.LocalSteps(keras.optimizers.SGD(0.1), every=4)
    _compiled(strategy, model, optimizer)
    model.train_on_batch(_rows(8) / 24, _targets(8))
    return model

  models = [train_apart() for _ in range(2)]
  _drop_on_some(strategy, models)
  model = train_apart()
  before = model.get_weights()
  model.evaluate(_rows(8), _targets(8), verbose=0)
  return before, model.get_weights()


class _Reader(keras.callbacks.Callback):
  """Reads what it is told, and the model."""

  def __init__(self):
    super().__init__()
    self.found = []

  def on_train_batch_end(self, batch, logs=None):
    """See base class."""
    self.found.append({k: float(v) for k, v in logs.items()})
    self.found.append([w.sum() for w in self.model.get_weights()])

  on_test_batch_end = on_train_batch_end


def _callbacks(strategy):
  """A `fit` with callbacks; only the chief reads logs and shows them."""
  callbacks = keras.callbacks
  with harness.scope_of(strategy):
    model = _predict_model()
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
  _compiled(strategy, model, optimizer)
  each_epoch = []

  def evaluate(epoch, logs):
    del epoch, logs
    loss, _ = model.evaluate(_rows(9), _targets(9), batch_size=8, verbose=0)
    predictions = model.predict(_rows(3), verbose=0)
    each_epoch.append((loss, predictions.sum()))

  is_chief = strategy is None or strategy.is_chief
  history = _fit(
    model,
    epochs=4,
    verbose=2 if is_chief else 0,
    validation_data=(_rows(17) / 51, _targets(17)),
    validation_batch_size=8,
    callbacks=[
      callbacks.EarlyStopping('loss', patience=1, restore_best_weights=True),
      callbacks.ReduceLROnPlateau('val_loss', 0.5, patience=0),
      callbacks.TerminateOnNaN(),
      callbacks.LambdaCallback(on_epoch_end=evaluate),
      *([_Reader(), callbacks.CSVLogger(os.devnull)] if is_chief else []),
    ],
  )
  return model.get_weights(), history, each_epoch


_PROGRAMS = {
  'statistics': _statistics,
  'plain_bn': _plain_bn,
  'loss_scale': _loss_scale,
  'dropout': _dropout,
  'embedding': _embedding,
  'predict': _predict,
  'gather': _gather,
  'reduce': _reduce,
  'eager_after_others': _eager_after_others,
  'meetings': _meetings,
  'callbacks': _callbacks,
}


def _compressed(case):
  """Weights after the same training, by what the gradients travel as."""
  weights = {}
  for compression in _COMPRESSIONS:
    strategy = tfs.MultiWorkerRingStrategy(
      options=tfs.RingOptions(compression=compression),
      devices=virtual_devices.names(case.devices),
    )
    result = harness.train(Feature('compressed'), strategy)
    weights[compression] = result.weights
    strategy.close()
  return weights


def _work(rank, case):
  del rank
  strategy = multi_worker.create(case)
  results = {}
  try:
    for name, program in _PROGRAMS.items():
      results[name] = program(strategy)
    strategy.close()
    if _SOAK and case == _COMPRESSED_CASE:
      results['compressed'] = _compressed(case)
  except Exception:
    results['error'] = traceback.format_exc()
    strategy.close()
  return results


@functools.cache
def _results(case):
  """What each worker sent home; one start of the workers for all tests."""
  return processes.run_workers(
    _work,
    case.workers,
    args=(case,),
    deadline=_DEADLINE_SECONDS,
    are_unlike=case.are_unlike or processes.ARE_UNLIKE,
  )


class MultiWorkerFeaturesTest(harness.ConformanceTest, parameterized.TestCase):
  def results(self, case, name):
    """Each worker's result of one program."""
    found = _results(case)
    self.assertLen(found, case.workers)
    for result in found:
      if name not in result:
        raise AssertionError(result['error'])
    return [result[name] for result in found]

  @tiers.named_parameters(*_EVERY)
  def test_moving_statistics_are_those_of_all_rows(self, case):
    n = case.workers * case.devices
    rows = np.concatenate([_part(i, n) for i in range(n)])
    # The mean of the replicas' variances would be 62 less on four of them.
    want = 0.5 * rows.mean(), 0.5 + 0.5 * rows.var()
    for statistics, rowless in self.results(case, 'statistics'):
      for copies, expected in zip(statistics, want, strict=True):
        self.assertLen(copies, case.devices)
        for copy in copies:
          self.assertAllClose(copy, [expected], 1e-5)
      # One row of 6: the other replicas have none, and are left out.
      for copies, expected in zip(rowless, (3.0, 0.5), strict=True):
        for copy in copies:
          self.assertAllClose(copy, [expected], 1e-5)

  @tiers.named_parameters(*_EVERY)
  def test_workers_without_rows_leave_no_nan(self, case):
    results = self.results(case, 'plain_bn')
    for weights, predictions, losses in results:
      for array in (*weights, predictions):
        self.assertTrue(np.isfinite(array).all())
      self.assertLess(losses[-1], losses[0])
      for mine, chiefs in zip(weights, results[0][0], strict=True):
        np.testing.assert_array_equal(mine, chiefs)
      np.testing.assert_array_equal(predictions, results[0][1])

  @tiers.named_parameters(*_EVERY)
  def test_overflow_on_one_worker_skips_the_step_on_all(self, case):
    for found in self.results(case, 'loss_scale'):
      self.assertLen(found, 2)
      for good, bad in found:
        # A finite step of d/dw mean((w/2)^2) = w/2, then one that is skipped.
        self.assertEqual(good, (0.75, [8.0]))
        self.assertEqual(bad, (0.75, [4.0]))

  @tiers.named_parameters(*_EVERY)
  def test_dropout_masks_differ_and_their_state_does_not(self, case):
    results = self.results(case, 'dropout')
    masks = np.array([masks for masks, _ in results]).reshape([-1, 64])
    self.assertLen(masks, 2 * case.workers * case.devices)
    for i in range(len(masks)):
      for j in range(i):
        # Independent masks of 64 agree in 32 places, give or take 4.
        self.assertBetween(int(np.sum(masks[i] == masks[j])), 12, 52)
    for _, states in results:
      self.assertLen(states, case.devices)
      for state in states:
        np.testing.assert_array_equal(state, results[0][1][0])

  @tiers.named_parameters(*_EVERY)
  def test_slices_with_duplicates_are_added_up(self, case):
    want = np.zeros([9, 2], np.float32)
    for row, ids in enumerate(_tokens()):
      for token in ids:
        want[token] += row + 1
    for copies in self.results(case, 'embedding'):
      self.assertLen(copies, case.devices)
      for copy in copies:
        np.testing.assert_array_equal(copy, want)

  @tiers.named_parameters(*_EVERY)
  def test_predictions_are_in_order(self, case):
    for predictions in self.results(case, 'predict'):
      for rows, got in predictions.items():
        want = _predict_model().predict(_rows(rows), batch_size=8, verbose=0)
        self.assertAllClose(got, want, 1e-6)

  @tiers.named_parameters(*_EVERY)
  def test_gather_of_uneven_lengths(self, case):
    n = case.workers * case.devices
    long = np.concatenate([np.full([1 + i, 2], i) for i in range(n)])
    for rows, columns in self.results(case, 'gather'):
      np.testing.assert_array_equal(rows, long)
      np.testing.assert_array_equal(columns, long.T)

  @tiers.named_parameters(*_EVERY)
  def test_reduce_by_dtype(self, case):
    n = case.workers * case.devices
    total = sum(10.0 * i + np.arange(3) for i in range(n))
    for found in self.results(case, 'reduce'):
      for dtype in _DTYPES:
        self.assertEqual(found[dtype, 'SUM'], (dtype, total.tolist()))
        self.assertEqual(found[dtype, 'MEAN'], (dtype, (total / n).tolist()))
      self.assertStartsWith(found['bool'], 'UnsupportedOptionError')
      self.assertIn('tf.cast', found['bool'])

  def assert_equals_one_device(self, results, expected):
    """Each worker's structure of numbers is one device's, and the first's exactly."""
    for result in results:
      self.assertAllClose(expected, result, 1e-5, 1e-6)
      self.assertAllEqual(
        [np.asarray(v).tolist() for v in tf.nest.flatten(result)],
        [np.asarray(v).tolist() for v in tf.nest.flatten(results[0])],
      )

  @tiers.named_parameters(*_EVERY)
  def test_eager_steps_after_models_that_some_workers_dropped(self, case):
    expected = _eager_after_others(None)
    self.assertAllClose(expected[2], [2 * (_rows(21) / 63).sum()] * 2)
    results = self.results(case, 'eager_after_others')
    self.assert_equals_one_device(results, expected)

  @tiers.named_parameters(*_EVERY)
  def test_meetings_beside_models_that_some_workers_dropped(self, case):
    (first, met), (other, met_too) = self.results(case, 'meetings')
    self.assertNotAllClose(first[0], other[0], 1e-6)
    for mine, theirs in zip(met, met_too, strict=True):
      np.testing.assert_array_equal(mine, theirs)

  @tiers.named_parameters(*_EVERY)
  def test_callbacks_of_which_only_the_chief_reads_logs(self, case):
    results = self.results(case, 'callbacks')
    self.assert_equals_one_device(results, _callbacks(None))

  @pytest.mark.soak
  def test_compressed_gradients_train(self):
    want = harness.train(Feature('compressed')).weights
    results = self.results(_COMPRESSED_CASE, 'compressed')
    for compression in _COMPRESSIONS:
      chiefs = results[0][compression]
      for result in results:
        for got, chief in zip(result[compression], chiefs, strict=True):
          np.testing.assert_array_equal(got, chief)
      furthest = max(
        np.abs(got - w).max() for got, w in zip(chiefs, want, strict=True)
      )
      self.assertLess(furthest, 2e-2, compression)
      self.assertGreater(furthest, 1e-6, 'nothing was compressed')


if __name__ == '__main__':
  tf.test.main()
