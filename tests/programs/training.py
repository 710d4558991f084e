"""Options of `compile`, and ways to train.

The programs use optimizers, metrics, callbacks, sample weights and custom
layers. No program refers to a strategy. The last batch has 14 rows.
"""

import functools
import pathlib
import tempfile

import keras
import numpy as np

from tests.programs import common

layers, losses, ops = keras.layers, keras.losses, keras.ops
_ROWS = 78  # Two batches of 32, and one of 14.
_CLASSES = 3


_points = functools.partial(common.points, 15)


def _net(units=_CLASSES, activation=None):
  return keras.Sequential(
    [
      layers.Input([6]),
      layers.Dense(8, 'tanh'),
      layers.Dropout(0.2),
      layers.Dense(units, activation),
    ]
  )


# Optimizers and precision.


def _fit(optimizer=lambda: 'adam', copies=1, fit=None, **options):
  """Returns a program that trains on copies of the rows.

  `options` are passed to `compile`.
  """

  def program():
    model = _net()
    model.compile(optimizer(), common.crossentropy(), **options)
    x, y = (np.concatenate([a] * copies) for a in _points())
    return common.results(model, x, y, **(fit or {}))

  return program


def _mixed_precision(policy):
  def program():
    keras.config.set_dtype_policy(policy)
    x, y = _points()
    model = keras.Sequential(
      [
        layers.Input([6]),
        layers.Dense(8, 'relu'),
        layers.BatchNormalization(),
        layers.Dense(8, 'relu'),
        layers.Dense(_CLASSES),
        layers.Activation('softmax', dtype='float32'),
      ]
    )
    loss = 'sparse_categorical_crossentropy'
    return common.train(model, x, y, common.momentum(), loss, ['accuracy'])

  return program


# Losses, metrics and sample weights.


def _several_heads():
  """Trains two inputs and three outputs with a loss each and sample weights."""
  x, y = _points()
  inputs = [layers.Input([6], name='points'), layers.Input([1], name='more')]
  hidden = layers.Dense(8, 'relu')(layers.Concatenate()(inputs))
  outputs = {
    'kind': layers.Dense(_CLASSES, 'softmax', name='kind')(hidden),
    'size': layers.Dense(1, name='size')(hidden),
    'is_big': layers.Dense(1, 'sigmoid', name='is_big')(hidden),
  }
  model = keras.Model(inputs, outputs)
  model.compile(
    'adam',
    {
      'kind': 'sparse_categorical_crossentropy',
      'size': losses.Huber(),
      'is_big': losses.BinaryFocalCrossentropy(),
    },
    loss_weights={'kind': 1.0, 'size': 0.5, 'is_big': 0.2},
    metrics={
      'kind': ['accuracy', keras.metrics.SparseTopKCategoricalAccuracy(2)],
      'size': [keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()],
    },
    weighted_metrics={'is_big': ['accuracy', keras.metrics.AUC()]},
  )
  x = {'points': x, 'more': x[:, :1] * 2}
  total = x['points'].sum(1, keepdims=True)
  # Centered: far from zero, R2 would be a small difference of large sums.
  y = {
    'kind': y,
    'size': total - total.mean(),
    'is_big': (total > 3).astype('f4'),
  }
  weights = {k: np.linspace(0, 1, _ROWS) for k in y}
  return common.results(model, x, y, sample_weight=weights)


def _metrics():
  x, y = _points()
  model = _net(_CLASSES, 'softmax')
  model.compile(
    'adam',
    'categorical_crossentropy',
    metrics=[
      'accuracy',
      keras.metrics.F1Score(),
      keras.metrics.F1Score('macro', name='macro'),
      keras.metrics.AUC(multi_label=True, num_labels=_CLASSES, name='auc'),
      keras.metrics.Precision(class_id=1),
      keras.metrics.Recall(thresholds=[0.2, 0.4]),
      keras.metrics.PrecisionAtRecall(0.5),
      keras.metrics.OneHotMeanIoU(_CLASSES),
      keras.metrics.TopKCategoricalAccuracy(2),
      keras.metrics.CosineSimilarity(),
      keras.metrics.MatthewsCorrelationCoefficient()
      if hasattr(keras.metrics, 'MatthewsCorrelationCoefficient')
      else keras.metrics.KLDivergence(),
    ],
    weighted_metrics=[keras.metrics.CategoricalAccuracy(name='weighted')],
  )
  y = keras.utils.to_categorical(y, _CLASSES)
  return common.results(model, x, y, validation_data=(x[:41], y[:41]))


class _Hits(keras.metrics.Metric):
  """A metric that counts hits per class, as in Keras's guide."""

  def __init__(self):
    super().__init__(name='hits')
    self.hits = self.add_weight([_CLASSES], 'zeros', name='hits')
    self.most = self.add_weight([], 'zeros', name='most')

  def update_state(self, y_true, y_pred, sample_weight=None):
    labels = ops.cast(ops.reshape(y_true, [-1]), 'int32')
    right = ops.cast(ops.equal(ops.argmax(y_pred, 1), labels), 'float32')
    if sample_weight is not None:
      right *= ops.cast(sample_weight, 'float32')
    hits = ops.one_hot(labels, _CLASSES) * right[:, None]
    self.hits.assign_add(ops.sum(hits, axis=0))
    self.most.assign(ops.maximum(self.most, ops.max(y_pred)))

  def result(self):
    return {'hits': ops.sum(self.hits), 'most': self.most}

  def reset_state(self):
    self.hits.assign(ops.zeros([_CLASSES]))
    self.most.assign(0.0)


class _Norm(layers.Layer):
  """A layer with a loss and a moving mean of its inputs."""

  def build(self, shape):
    self.scale = self.add_weight(
      shape=[shape[-1]], initializer='ones', regularizer='l2'
    )
    self.mean = self.add_weight(
      shape=[shape[-1]], initializer='zeros', trainable=False
    )
    self.seen = self.add_weight(
      shape=[], initializer='zeros', trainable=False, dtype='int32'
    )

  def call(self, x, training=None):
    self.add_loss(1e-2 * ops.mean(ops.square(x)))
    if training:
      self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
      self.seen.assign_add(ops.shape(x)[0])
    return (x - self.mean) * self.scale


def _own_layer_and_metric():
  x, y = _points()
  inputs = layers.Input([6])
  hidden = _Norm()(layers.Dense(8, 'relu')(inputs))
  model = keras.Model(inputs, layers.Dense(_CLASSES)(hidden))
  return common.train(model, x, y, metrics=[_Hits()])


def _sample_weight():
  x, y = _points()
  weights = np.random.default_rng(1).random(_ROWS).astype('f4')
  weights[:20] = 0
  model = _net()
  model.compile('adam', common.crossentropy(), weighted_metrics=['accuracy'])
  data = (x, y, weights)
  found = common.results(
    model, x, y, sample_weight=weights, validation_data=data
  )
  loss = losses.CategoricalCrossentropy(True, label_smoothing=0.1)
  y = keras.utils.to_categorical(y, _CLASSES)
  return found, common.train(model, x, y, loss=loss, metrics=['accuracy'])


# Ways to train.


def _all_callbacks():
  """Runs every kind of callback. With several workers, one writes the files."""
  directory = pathlib.Path(common.shared_directory()) / 'all_callbacks'
  x, y = _points()
  model = _net()
  model.compile(
    keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9),
    common.crossentropy(),
    metrics=['accuracy'],
  )
  losses_seen = []
  callbacks = keras.callbacks
  history = model.fit(
    x,
    y,
    32,
    4,
    verbose=0,
    validation_split=0.2,
    callbacks=[
      callbacks.BackupAndRestore(directory / 'backup'),
      callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
      callbacks.ReduceLROnPlateau('val_loss', min_delta=1.0, patience=1),
      callbacks.EarlyStopping(
        'val_loss', patience=2, min_delta=0.5, restore_best_weights=True
      ),
      callbacks.SwapEMAWeights(swap_on_epoch=True),
      callbacks.ModelCheckpoint(
        directory / 'best.weights.h5', save_weights_only=True
      ),
      callbacks.CSVLogger(directory / 'log.csv'),
      callbacks.TensorBoard(directory / 'board'),
      callbacks.TerminateOnNaN(),
      callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses_seen.append(logs['loss'])
      ),
    ],
  )
  found = model.evaluate(x, y, verbose=0)  # The chief has closed its files.
  events = [path.parent.name for path in directory.glob('board/*/*tfevents*')]
  assert sorted(events) == ['train', 'validation'], events
  rows = (directory / 'log.csv').read_text().splitlines()[1:]
  found += [float(n) for row in rows for n in row.split(',')]
  weights = model.get_weights()
  model.load_weights(directory / 'best.weights.h5')
  return history.history, losses_seen, found, weights, model.get_weights()


def _lora():
  x, y = _points()
  model = keras.Sequential(
    [
      layers.Input([6], dtype='int32'),
      layers.Embedding(4, 8),
      layers.Flatten(),
      layers.Dense(8, 'relu'),
      layers.Dense(_CLASSES),
    ]
  )
  x = (x * 4).astype('i4')
  first = common.train(model, x, y, epochs=1)
  model.layers[0].enable_lora(2)
  model.layers[2].enable_lora(2)
  model.layers[3].trainable = False
  return first, common.train(model, x, y, keras.optimizers.Adam(1e-2))


def _on_batches():
  """Runs a custom loop around `train_on_batch` with two networks."""
  x, y = _points()
  maker = keras.Sequential([layers.Input([4]), layers.Dense(6)])
  critic = _net(1, 'sigmoid')
  critic.compile('adam', 'binary_crossentropy', metrics=['accuracy'])
  classifier = _net()
  classifier.compile('sgd', common.crossentropy(), metrics=['accuracy'])
  rng = np.random.default_rng(2)
  found = []
  for start in range(0, _ROWS, 32):
    real = x[start : start + 32]
    fake = maker.predict_on_batch(rng.normal(size=(len(real), 4)).astype('f4'))
    both = np.concatenate([real, fake])
    labels = np.arange(2 * len(real)) < len(real)
    found.append(critic.train_on_batch(both, labels.astype('f4')))
    found.append(
      classifier.train_on_batch(real, y[start : start + 32], return_dict=True)
    )
  found.append(classifier.test_on_batch(x, y))
  return found, critic.get_weights(), classifier.get_weights()


def _saved_and_loaded():
  """Saves a model in the middle of training, loads it and continues."""
  x, y = _points()
  model = _net()
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / 'model.keras'
    callbacks = [keras.callbacks.ModelCheckpoint(path, monitor='loss')]
    first = common.train(
      model, x, y, metrics=['accuracy'], epochs=1, callbacks=callbacks
    )
    loaded = keras.models.load_model(path)
  for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)
  return first, common.results(loaded, x, y, epochs=1)


PROGRAMS = {
  **{f'optimizer_{k}': _fit(v) for k, v in common.OPTIMIZERS.items()},
  'mixed_float16': _mixed_precision('mixed_float16'),
  'mixed_bfloat16': _mixed_precision('mixed_bfloat16'),
  'several_heads': _several_heads,
  'metrics': _metrics,
  'own_layer_and_metric': _own_layer_and_metric,
  'class_weight': _fit(
    fit={'class_weight': {0: 1.0, 1: 3.0, 2: 0.5}},
    weighted_metrics=['accuracy'],
  ),
  'sample_weight': _sample_weight,
  'all_callbacks': _all_callbacks,
  'lora': _lora,
  'steps_per_execution': _fit(
    copies=2, metrics=['accuracy'], steps_per_execution=4
  ),
  'on_batches': _on_batches,
  'run_eagerly': _fit(
    fit={'epochs': 1}, metrics=['accuracy'], run_eagerly=True
  ),
  'saved_and_loaded': _saved_and_loaded,
}
