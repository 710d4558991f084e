"""Keras programs that must do under a strategy what they do on one device.

Each takes a strategy, or None for one device, and returns what came out of it.
They are those ways to feed and steer `fit` that one `harness.Feature` cannot say.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.conformance import harness
from tests.conformance.harness import Feature

_ROWS = 69
_FEATURE = Feature('program', rows=_ROWS)


def _outcome(model, history=None) -> dict[str, Any]:
  found = {f'weight {i}': w for i, w in enumerate(model.get_weights())}
  found['iterations'] = int(model.optimizer.iterations.numpy())
  for key, values in getattr(history, 'history', {}).items():
    found[f'history {key}'] = np.asarray(values)
  return found


def _dataset(rows=_ROWS) -> tf.data.Dataset:
  return tf.data.Dataset.from_tensor_slices(harness.images(rows)).batch(32)


def _fit(model, epochs=3, **options):
  x, y = harness.images(_ROWS)
  options = {
    'batch_size': 32,
    'shuffle': False,
    'verbose': 0,
    'epochs': epochs,
    **options,
  }
  return model.fit(x, y, **options)


def _of_unknown_cardinality(dataset, batches, strategy):
  """The dataset, whose end nobody can know before; one device is told it.

  When Keras learns of the end from a step that finds no data, one device has
  counted that step in `iterations` already, though it trained on nothing.
  """
  dataset = dataset.filter(lambda *unused: True)
  assert int(dataset.cardinality()) == tf.data.UNKNOWN_CARDINALITY
  if strategy is None:
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(batches))
  return dataset


def finite_dataset(strategy):
  model = harness.build(_FEATURE, strategy)
  history = model.fit(_dataset(), epochs=2, verbose=0)
  return _outcome(model, history)


def dataset_of_unknown_cardinality(strategy):
  model = harness.build(_FEATURE, strategy)
  x, y = harness.images(_ROWS)
  dataset = tf.data.Dataset.from_generator(
    lambda: zip(x, y, strict=True),
    output_signature=(
      tf.TensorSpec([8, 8, 1], tf.float32),
      tf.TensorSpec([], tf.int64),
    ),
  ).batch(32)
  dataset = _of_unknown_cardinality(dataset, 3, strategy)
  history = model.fit(
    dataset, epochs=3, verbose=0, validation_data=_dataset(39)
  )
  return _outcome(model, history)


def unknown_cardinality_and_steps_per_execution(strategy):
  feature = Feature('program', compile={'steps_per_execution': 2})
  model = harness.build(feature, strategy)
  dataset = _of_unknown_cardinality(_dataset(133), 5, strategy)
  history = model.fit(dataset, epochs=2, verbose=0)
  return _outcome(model, history)


def repeated_dataset_and_steps_per_epoch(strategy):
  model = harness.build(_FEATURE, strategy)
  history = model.fit(
    _dataset().repeat(),
    epochs=3,
    steps_per_epoch=2,
    verbose=0,
    validation_data=_dataset(96).repeat(),
    validation_steps=2,
  )
  return _outcome(model, history)


def python_generator(strategy):
  model = harness.build(_FEATURE, strategy)
  x, y = harness.images(_ROWS)

  def batches():
    while True:
      for i in range(0, _ROWS, 32):
        yield x[i : i + 32], y[i : i + 32]

  history = model.fit(batches(), epochs=2, steps_per_epoch=3, verbose=0)
  return _outcome(model, history)


class _Batches(keras.utils.PyDataset):
  def __init__(self):
    super().__init__()
    self._x, self._y = harness.images(_ROWS)

  def __len__(self):
    return 3

  def __getitem__(self, index):
    rows = slice(32 * index, 32 * index + 32)
    return self._x[rows], self._y[rows]


def py_dataset(strategy):
  model = harness.build(_FEATURE, strategy)
  history = model.fit(_Batches(), epochs=2, shuffle=False, verbose=0)
  return _outcome(model, history)


def train_test_and_predict_on_batch(strategy):
  model = harness.build(_FEATURE, strategy)
  x, y = harness.images(_ROWS)
  found = {}
  for step, i in enumerate(range(0, _ROWS, 32)):
    rows = slice(i, i + 32)
    logs = model.train_on_batch(x[rows], y[rows], return_dict=True)
    for key, value in logs.items():
      found[f'train {step} {key}'] = float(value)
  logs = model.test_on_batch(x[:32], y[:32], return_dict=True)
  found.update({f'test {key}': float(v) for key, v in logs.items()})
  found['predictions'] = np.asarray(model.predict_on_batch(x[:5]))
  return {**found, **_outcome(model)}


def learning_rate_scheduler(strategy):
  model = harness.build(_FEATURE, strategy)
  rates = []
  history = _fit(
    model,
    callbacks=[
      keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr / 2),
      keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(
          float(model.optimizer.learning_rate.numpy())
        )
      ),
    ],
  )
  return {**_outcome(model, history), 'rates': np.asarray(rates)}


def learning_rate_schedule(strategy):
  feature = Feature(
    'program',
    optimizer=lambda: keras.optimizers.SGD(
      keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
  )
  model = harness.build(feature, strategy)
  return _outcome(model, _fit(model))


def early_stopping_restores_the_best_weights(strategy):
  model = harness.build(_FEATURE, strategy)
  callback = keras.callbacks.EarlyStopping(
    monitor='loss', min_delta=1.0, patience=1, restore_best_weights=True
  )
  history = _fit(model, 6, callbacks=[callback])
  assert len(history.history['loss']) < 6
  return _outcome(model, history)


def model_checkpoint(strategy):
  model = harness.build(_FEATURE, strategy)
  with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, 'model.keras')
    callback = keras.callbacks.ModelCheckpoint(path, monitor='loss')
    history = _fit(model, callbacks=[callback])
    loaded = keras.models.load_model(path)
  for saved, trained in zip(
    loaded.get_weights(), model.get_weights(), strict=True
  ):
    np.testing.assert_array_equal(saved, trained)
  found = _outcome(loaded, history)
  assert found['iterations'] == 9
  return found


def backup_and_restore(strategy):
  """One epoch, then a new model that goes on with the second and third."""
  with tempfile.TemporaryDirectory() as directory:
    first = harness.build(_FEATURE, strategy)
    backup = keras.callbacks.BackupAndRestore(
      directory, delete_checkpoint=False
    )
    _fit(first, 1, callbacks=[backup])
    second = harness.build(_FEATURE, strategy)
    history = _fit(
      second, 3, callbacks=[keras.callbacks.BackupAndRestore(directory)]
    )
  assert len(history.history['loss']) == 2
  return _outcome(second, history)


class Confusion(keras.metrics.Metric):
  """Sums by class: a metric with a matrix, which a step writes sparsely."""

  def __init__(self):
    super().__init__(name='confusion')
    self.counts = self.add_weight(
      shape=[10], initializer='zeros', name='counts'
    )
    self.rows = self.add_weight(shape=[], initializer='zeros', name='rows')

  def update_state(self, y_true, y_pred, sample_weight=None):
    found = tf.reduce_sum(tf.one_hot(tf.argmax(y_pred, -1), 10), 0)
    self.counts.assign_add(found)
    self.rows.assign(self.rows + tf.cast(tf.shape(y_true)[0], tf.float32))

  def result(self):
    return tf.tensordot(self.counts, tf.range(10.0), 1) / self.rows


def custom_metric(strategy):
  with harness.scope_of(strategy):
    metric = Confusion()
  feature = Feature('program', compile={'metrics': [metric, 'accuracy']})
  model = harness.build(feature, strategy)
  found = _outcome(model, _fit(model, validation_data=harness.images(39)))
  return {**found, 'rows': float(metric.rows.numpy())}


class DoublingModel(keras.Model):
  """A model with a `train_step` of its own, which keeps a metric of its own."""

  def __init__(self, **options):
    super().__init__(**options)
    self.tracker = keras.metrics.Mean(name='tracked')
    self.seen = self.add_weight(
      shape=[], dtype='int64', initializer='zeros', trainable=False
    )

  def train_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
      loss = 2.0 * self.compute_loss(y=y, y_pred=self(x, training=True))
    variables = self.trainable_variables
    self.optimizer.apply_gradients(
      zip(tape.gradient(loss, variables), variables, strict=True)
    )
    self.seen.assign_add(tf.shape(x, tf.int64)[0])
    self.tracker.update_state(loss)
    return {'tracked': self.tracker.result(), 'seen': self.seen}


def custom_train_step(strategy):
  def make():
    inputs = keras.layers.Input([8, 8, 1])
    hidden = keras.layers.Flatten()(inputs)
    return DoublingModel(inputs=inputs, outputs=keras.layers.Dense(10)(hidden))

  model = harness.build(
    Feature('program', model=make, compile={'metrics': None}), strategy
  )
  return _outcome(model, _fit(model))


def two_inputs_and_two_outputs(strategy):
  """Structures of batches: a dictionary in, a list of losses out."""
  x, y = harness.images(_ROWS)
  keras.backend.clear_session()
  keras.utils.set_random_seed(11)
  with harness.scope_of(strategy):
    a = keras.layers.Input([8, 8, 1], name='a')
    b = keras.layers.Input([3], name='b')
    hidden = keras.layers.Concatenate()([keras.layers.Flatten()(a), b])
    first = keras.layers.Dense(10, name='first')(hidden)
    second = keras.layers.Dense(1, name='second')(hidden)
    model = keras.Model({'a': a, 'b': b}, {'first': first, 'second': second})
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
      harness.momentum(),
      {'first': crossentropy, 'second': 'mse'},
      metrics={'first': ['accuracy'], 'second': ['mae']},
    )
  inputs = {'a': x, 'b': x.reshape(_ROWS, -1)[:, :3]}
  targets = {'first': y, 'second': y[:, None].astype(np.float32) / 10}
  history = model.fit(
    inputs, targets, batch_size=32, epochs=2, shuffle=False, verbose=0
  )
  found = _outcome(model, history)
  predicted = model.predict(inputs, batch_size=32, verbose=0)
  return {**found, **{f'predicted {k}': v for k, v in predicted.items()}}


def auc(strategy):
  """A metric whose state is vectors, with thresholds."""
  with harness.scope_of(strategy):
    metric = keras.metrics.AUC(from_logits=True, num_thresholds=20, name='auc')
  loss = keras.losses.BinaryCrossentropy(from_logits=True)
  feature = Feature('program', compile={'loss': loss, 'metrics': [metric]})
  model = harness.build(feature, strategy)
  x, y = harness.images(_ROWS)
  history = model.fit(
    x,
    keras.utils.to_categorical(y, 10),
    batch_size=32,
    epochs=2,
    shuffle=False,
    verbose=0,
  )
  return _outcome(model, history)


def freezing_a_layer(strategy):
  """`fit`, then a layer is frozen and the model compiled again."""
  model = harness.build(_FEATURE, strategy)
  _fit(model, 1)
  frozen = model.layers[0]
  before = [np.array(w) for w in frozen.get_weights()]
  frozen.trainable = False
  with harness.scope_of(strategy):
    model.compile(
      harness.momentum(),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=['accuracy'],
    )
  found = _outcome(model, _fit(model, 1))
  for want, got in zip(before, frozen.get_weights(), strict=True):
    np.testing.assert_array_equal(want, got)
  return found


def setting_weights_between_epochs(strategy):
  """The coordinator writes what workers read in the next step."""
  model = harness.build(_FEATURE, strategy)
  history = _fit(
    model,
    callbacks=[
      keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.set_weights(
          [w * 0.5 for w in model.get_weights()]
        )
      )
    ],
  )
  return _outcome(model, history)


def two_models_at_once(strategy):
  """Steps of two models, in turn, on the same servers."""
  models = [harness.build(_FEATURE, strategy)]
  with harness.scope_of(strategy):
    models.append(keras.models.clone_model(models[0]))
    models[1].set_weights([w * 0.5 for w in models[0].get_weights()])
    models[1].compile(
      harness.momentum(),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
  found = {}
  for i in (0, 1, 0, 1):
    history = _fit(models[i], 1)
    found.update(
      {f'model {i} {k}': v for k, v in _outcome(models[i], history).items()}
    )
  return found


PROGRAMS: dict[str, Callable] = {
  f.__name__: f
  for f in (
    finite_dataset,
    dataset_of_unknown_cardinality,
    unknown_cardinality_and_steps_per_execution,
    repeated_dataset_and_steps_per_epoch,
    python_generator,
    py_dataset,
    train_test_and_predict_on_batch,
    learning_rate_scheduler,
    learning_rate_schedule,
    early_stopping_restores_the_best_weights,
    model_checkpoint,
    backup_and_restore,
    custom_metric,
    custom_train_step,
    two_inputs_and_two_outputs,
    auc,
    freezing_a_layer,
    setting_weights_between_epochs,
    two_models_at_once,
  )
}
