"""One small model that `fit` trains with one option, input or callback each.

The programs in other files have 78 rows. These have fewer, so that some
replicas or workers get no rows.
"""

import functools
import gc
import os

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests.programs import common

layers, optimizers = keras.layers, keras.optimizers
_ROWS = 69  # Two batches of 32, and one of 5.


def _fit(rows=_ROWS, data=common.images, policy=None, fit=None, **options):
  """Returns a program. `options` are passed to `common.compiled`."""

  def program():
    if policy:
      keras.config.set_dtype_policy(policy)
    model = common.compiled(**options)
    return common.results(model, *data(rows), **(fit or {}))

  return program


_embedding = functools.partial(
  _fit, data=common.tokens, make_model=common.embedding_model
)


def _normalized(rows, steps_per_execution=1, **options):
  """Returns a program without predictions: normalization would amplify their
  rounding.
  """

  def program():
    model = common.compiled(
      lambda: common.conv_model(layers.BatchNormalization(**options)),
      lambda: optimizers.SGD(0.01, momentum=0.9),
      steps_per_execution=steps_per_execution,
    )
    x, y = common.images(rows)
    return common.fitted(model, x, y), model.evaluate(x, y, 32, verbose=0)

  return program


def _regularized():
  return common.conv_model(
    layers.Dense(6, kernel_regularizer='l2', kernel_constraint='max_norm'),
    kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2),
  )


def _accumulating(**options):
  return optimizers.Adam(1e-2, gradient_accumulation_steps=2, **options)


def _statistics():
  """Checks that moving statistics cover all rows, even where a replica has only
  one.
  """
  x = np.concatenate(
    [10.0 * i + (i + 1) * np.linspace(-1, 1, 8) for i in range(4)]
  )
  found = []
  for rows in (x[:, None], np.array([[6.0]])):
    model = keras.Sequential(
      [
        layers.Input([1]),
        layers.BatchNormalization(momentum=0.5, center=False, scale=False),
        layers.Dense(1),
      ]
    )
    model.compile(common.momentum(), 'mse')
    common.fit(model, rows.astype('f4'), rows, epochs=1)
    found.append(common.state_of(model))
  return found


def _overflow(bad_row):
  """Runs a finite step, then one that overflows on one replica and must be
  skipped everywhere.
  """

  def program():
    ones = layers.Dense(1, use_bias=False, kernel_initializer='ones')
    model = keras.Sequential([layers.Input([1]), ones])
    optimizer = optimizers.SGD(0.5)
    model.compile(optimizers.LossScaleOptimizer(optimizer, 8.0), 'mse')
    x, y = np.full([8, 1], 0.5, np.float32), np.zeros([8, 1], np.float32)
    found = []
    for value in (0.5, np.inf):
      x[bad_row] = value
      model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
      scale = model.optimizer.dynamic_scale.numpy()
      found.append((model.get_weights()[0].item(), scale))
    # d/dw mean((w/2)^2) = w/2.
    assert found == [(0.75, 8.0), (0.75, 4.0)], found
    return [found, common.state_of(model)]

  return program


# Data.


def _dataset(rows=_ROWS):
  return tf.data.Dataset.from_tensor_slices(common.images(rows)).batch(32)


def _of_unknown_cardinality(rows, **options):
  """Returns a program whose data has an unknown number of batches.

  Keras finds the end with a step that gets no data. One device counts that step
  in `iterations` although it trains on nothing. Parameter servers do not count
  it.
  """

  def program():
    dataset = _dataset(rows).filter(lambda *unused: True)
    dataset = dataset.map(lambda x, y: (x, y, None))
    model = common.compiled(**options)
    history = common.fit(model, dataset, validation_data=_dataset(39))
    if isinstance(tf.distribute.get_strategy(), tfs.ParameterServerStrategy):
      assert int(model.optimizer.iterations.numpy()) == 2 * -(-rows // 32)
    return history, model.get_weights()

  return program


def _repeated():
  model = common.compiled()
  history = common.fit(
    model,
    _dataset().repeat(),
    epochs=3,
    steps_per_epoch=2,
    validation_data=_dataset(96).repeat(),
    validation_steps=2,
  )
  return history, common.state_of(model)


def _predicted():
  """Checks the order of predictions, also where replicas have different numbers
  of rows.
  """
  model = common.linear(3, 2)
  return [
    model.predict(_numbers(rows), batch_size=8, verbose=0)
    for rows in (24, 21, 17, 1)
  ]


def _numbers(rows, width=3):
  count = np.arange(width * rows, dtype=np.float32)
  return count.reshape([rows, width]) / count.size


# Callbacks, and several models.


def _weights_set_between_epochs():
  model = common.compiled()

  def halve(epoch, logs):
    model.set_weights([w * 0.5 for w in model.get_weights()])

  callback = keras.callbacks.LambdaCallback(on_epoch_end=halve)
  x, y = common.images(_ROWS)
  return common.results(model, x, y, callbacks=[callback])


def _two_models_at_once():
  models = [common.compiled()]
  models.append(common.compiled(lambda: keras.models.clone_model(models[0])))
  models[1].set_weights([w * 0.5 for w in models[0].get_weights()])
  x, y = common.images(_ROWS)
  return [common.results(models[i], x, y, epochs=1) for i in (0, 1, 0, 1)]


class _InterruptAt(keras.callbacks.Callback):
  """Raises in the middle of the second epoch, as a crash would."""

  _epoch = 0

  def on_epoch_begin(self, epoch, logs=None):
    self._epoch = epoch

  def on_train_batch_end(self, batch, logs=None):
    if (self._epoch, batch) == (1, 1):
      raise InterruptedError


def _backup_and_restore():
  """Checks that an interrupted run ends with the same bits as an uninterrupted one."""
  x, y = common.images(_ROWS)

  def train(*callbacks):
    keras.utils.set_random_seed(11)
    model = common.compiled()
    try:
      common.fit(model, x, y, epochs=3, callbacks=list(callbacks))
    except InterruptedError:
      return None
    return common.state_of(model)

  whole = train()
  directory = os.path.join(common.shared_directory(), 'backup')
  backup = keras.callbacks.BackupAndRestore
  assert train(backup(directory), _InterruptAt()) is None
  resumed = train(backup(directory))
  for a, b in zip(whole[0], resumed[0], strict=True):
    np.testing.assert_array_equal(a, b)
  return resumed


class _Reader(keras.callbacks.Callback):
  """Reads the logs and the model."""

  def on_train_batch_end(self, batch, logs=None):
    """See base class."""
    assert all(np.isfinite(float(v)) for v in logs.values())
    assert all(np.isfinite(w).all() for w in self.model.get_weights())

  on_test_batch_end = on_train_batch_end


def _rank():
  return getattr(tf.distribute.get_strategy(), 'rank', 0)


def _read_by_the_chief():
  """Uses callbacks that read and show logs on the chief only."""
  callbacks = keras.callbacks
  model = common.compiled()
  x, y = common.images(21)
  each_epoch = []

  def evaluate(epoch, logs):
    found = model.evaluate(x[:9], y[:9], batch_size=8, verbose=0)
    each_epoch.append([*found, model.predict(x[:3], verbose=0)])

  is_chief = _rank() == 0
  history = common.fit(
    model,
    x,
    y,
    batch_size=8,
    epochs=4,
    verbose=2 if is_chief else 0,
    validation_data=common.images(17),
    validation_batch_size=8,
    callbacks=[
      callbacks.EarlyStopping('loss', patience=1, restore_best_weights=True),
      callbacks.ReduceLROnPlateau('val_loss', 0.5, patience=0),
      callbacks.TerminateOnNaN(),
      callbacks.LambdaCallback(on_epoch_end=evaluate),
      *([_Reader(), callbacks.CSVLogger(os.devnull)] if is_chief else []),
    ],
  )
  return history, each_epoch, common.state_of(model)


def drop_on_some(models):
  """Deletes the models on every worker except the first."""
  if _rank():
    models.clear()
    common.trained.clear()
    gc.collect()


def _eager_after_others():
  """Runs an eager `fit` after some workers have deleted earlier models.

  Its step updates two metrics that the model does not track. One is updated
  inside a function, whose Python code does not run in later steps.
  """
  x, y = common.images(21)
  models = [common.compiled() for _ in range(2)]
  outside, inside = keras.metrics.Sum(), keras.metrics.Sum()
  for model in models:
    common.fit(model, x, y, batch_size=8)
  del model
  drop_on_some(models)

  traces = []

  @tf.function(input_signature=[tf.TensorSpec([None] * 4), tf.TensorSpec([])])
  def count(x, factor):
    traces.append(factor)
    inside.update_state(x * tf.identity(factor))

  class Own(keras.Sequential):
    def train_step(self, data):
      outside.update_state(data[0])
      count(data[0], 1)
      return super().train_step(data)

  keras.utils.set_random_seed(2)
  model = common.compiled(
    lambda: Own(common.conv_model().layers), run_eagerly=True
  )
  history = common.fit(model, x, y, batch_size=8)
  totals = [float(metric.result()) for metric in (outside, inside)]
  np.testing.assert_allclose(totals, 2 * x.sum(), 1e-4, 1e-4)
  assert len(traces) == 1, traces
  return history, totals, common.state_of(model)


def _averages_in_evaluations():
  """Replaces the weights by their averages during each evaluation."""
  model = common.compiled(
    optimizer=lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.7)
  )
  swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=False)
  return common.results(
    model,
    *common.images(_ROWS),
    callbacks=[swap],
    validation_data=common.images(9),
  )


PROGRAMS = {
  'rows_69': _fit(),
  # Several workers or four replicas: some get no row of the last batch.
  'rows_65': _fit(65),
  'only_1_row': _fit(1),
  'clipvalue': _fit(optimizer=lambda: optimizers.SGD(0.1, clipvalue=0.01)),
  'batch_normalization': _normalized(65, momentum=0.5),
  'batch_normalization_steps_per_execution': _normalized(133, 4, momentum=0.8),
  'sync_batch_normalization': _normalized(65, synchronized=True),
  'statistics': _statistics,
  'regularizers_and_constraint': _fit(make_model=_regularized),
  'embedding_clipnorm': _embedding(
    optimizer=lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
  ),
  'embedding_steps_per_execution': _embedding(
    optimizer=lambda: optimizers.Adam(1e-2),
    steps_per_execution=2,
  ),
  'lazy_rows': _embedding(
    optimizer=lambda: tfs.keras.LazyRows(optimizers.Adam(1e-2)),
  ),
  'mixed_float16_embedding': _embedding(
    policy='mixed_float16',
  ),
  'run_eagerly_1_row': _fit(65, run_eagerly=True),
  'steps_per_epoch': _fit(96, fit={'steps_per_epoch': 2}),
  'accumulation_global_clipnorm': _fit(
    133, optimizer=lambda: _accumulating(global_clipnorm=0.05)
  ),
  'ema': _fit(
    optimizer=lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
  ),
  'ema_overwrite_accumulation_steps_per_execution': _fit(
    133,
    optimizer=lambda: _accumulating(use_ema=True, ema_overwrite_frequency=2),
    steps_per_execution=2,
  ),
  'mixed_float16_global_clipnorm': _fit(
    optimizer=lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    policy='mixed_float16',
  ),
  'averages_in_evaluations': _averages_in_evaluations,
  'overflow_of_the_first': _overflow(0),
  'overflow_of_the_last': _overflow(7),
  'unknown_cardinality': _of_unknown_cardinality(_ROWS),
  'unknown_cardinality_and_steps_per_execution': _of_unknown_cardinality(
    133, steps_per_execution=2
  ),
  'repeated_dataset': _repeated,
  'predicted': _predicted,
  'weights_set_between_epochs': _weights_set_between_epochs,
  'two_models_at_once': _two_models_at_once,
  'backup_and_restore': _backup_and_restore,
  'read_by_the_chief': _read_by_the_chief,
  'eager_after_others': _eager_after_others,
}
# An embedding table, with each optimizer. Batches contain some rows twice.
TABLES = {
  f'table_{name}': _embedding(optimizer=make)
  for name, make in common.OPTIMIZERS.items()
}
