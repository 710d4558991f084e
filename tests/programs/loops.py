"""Custom loops, which ask TensorFlow for the current strategy.

They are structured like TensorFlow's tutorials. Outside a scope,
`tf.distribute.get_strategy()` returns the default strategy for one device. The
last batch has 14 rows.
"""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

layers, losses = keras.layers, keras.losses
_ROWS = 78  # Two batches of 32, and one of 14.
_CLASSES = 4
_BATCH = 32


def _data():
  rng = np.random.default_rng(18)
  x = rng.normal(size=(_ROWS, 8, 8, 1)).astype('f4')
  return x, rng.integers(0, _CLASSES, _ROWS)


def _distributed():
  """Returns the strategy, and its batches of the data."""
  strategy = tf.distribute.get_strategy()
  dataset = common.batches(*_data())
  return strategy, strategy.experimental_distribute_dataset(dataset)


def _model():
  return keras.Sequential(
    [
      layers.Input([8, 8, 1]),
      layers.Conv2D(4, 3, activation='relu', kernel_regularizer='l2'),
      layers.MaxPooling2D(),
      layers.Flatten(),
      layers.Dense(_CLASSES),
    ]
  )


def _per_row():
  return losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction='none'
  )


def _custom_training():
  """Follows "Custom training with tf.distribute.Strategy": average loss,
  metrics, a test.
  """
  strategy, distributed = _distributed()
  model, per_row = _model(), _per_row()
  optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
  accuracy = keras.metrics.SparseCategoricalAccuracy()
  test_loss = keras.metrics.Mean()

  def compute_loss(y, outputs):
    loss = tf.nn.compute_average_loss(
      per_row(y, outputs), global_batch_size=_BATCH
    )
    return loss + tf.nn.scale_regularization_loss(tf.add_n(model.losses))

  def train_step(inputs):
    x, y = inputs
    with tf.GradientTape() as tape:
      outputs = model(x, training=True)
      loss = compute_loss(y, outputs)
    common.descend(optimizer, tape, loss, model.trainable_variables)
    accuracy.update_state(y, outputs)
    return loss

  def test_step(inputs):
    x, y = inputs
    test_loss.update_state(per_row(y, model(x)))

  @tf.function
  def distributed_train_step(inputs):
    parts = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)

  @tf.function
  def distributed_test_step(inputs):
    strategy.run(test_step, args=(inputs,))

  found = []
  for _ in range(2):
    found += [float(distributed_train_step(batch)) for batch in distributed]
    for batch in distributed:
      distributed_test_step(batch)
    found += [float(accuracy.result()), float(test_loss.result())]
    accuracy.reset_state()
    test_loss.reset_state()
  return [found, model.get_weights()]


def _loop_over_workers():
  """Follows "Custom training loop with Keras and MultiWorkerMirroredStrategy".

  Each worker makes its data with a function. One `tf.function` runs a whole
  epoch. A second model continues from a checkpoint.
  """
  strategy = tf.distribute.get_strategy()

  def make_dataset(context):
    size = context.get_per_replica_batch_size(_BATCH)
    dataset = tf.data.Dataset.from_tensor_slices(_data())
    dataset = dataset.shard(
      context.num_input_pipelines, context.input_pipeline_id
    )
    return dataset.batch(size).repeat(1)

  distributed = strategy.distribute_datasets_from_function(make_dataset)
  per_row = _per_row()

  def make():
    model = _model()
    optimizer = keras.optimizers.RMSprop(1e-2)
    optimizer.build(model.trainable_variables)
    return model, optimizer

  def make_epoch(model, optimizer):
    def step(inputs):
      x, y = inputs
      with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = tf.nn.compute_average_loss(
          per_row(y, outputs), global_batch_size=_BATCH
        )
      common.descend(optimizer, tape, loss, model.trainable_variables)
      return loss

    @tf.function
    def epoch(dataset):
      total = tf.constant(0.0)
      for batch in dataset:
        parts = strategy.run(step, args=(batch,))
        total += strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)
      return total

    return epoch

  model, optimizer = make()
  found = [float(make_epoch(model, optimizer)(distributed))]
  with tempfile.TemporaryDirectory() as directory:
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    path = checkpoint.write(os.path.join(directory, 'written'))
    model, optimizer = make()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.read(path).assert_consumed()
  found.append(float(make_epoch(model, optimizer)(distributed)))
  return [found, int(optimizer.iterations), model.get_weights()]


def _contrastive():
  """Compares each row with the features of all replicas' rows (in-batch negatives)."""
  strategy, distributed = _distributed()
  model = _model()
  optimizer = keras.optimizers.SGD(0.1)

  @tf.function
  def train_step(inputs):
    def step(inputs):
      x, y = inputs
      context = tf.distribute.get_replica_context()
      with tf.GradientTape() as tape:
        features = tf.math.l2_normalize(model(x, training=True), axis=1)
        everyone = context.all_gather(features, axis=0)
        labels = context.all_gather(y, axis=0)
        scores = features @ tf.transpose(everyone) / 0.1
        is_alike = tf.cast(y[:, None] == labels[None], tf.float32)
        per_row = -tf.reduce_sum(
          is_alike * tf.nn.log_softmax(scores), axis=1
        ) / tf.reduce_sum(is_alike, axis=1)
        # The mean over this replica's rows, as a share of the global mean.
        loss = tf.reduce_sum(per_row) / tf.cast(len(everyone), tf.float32)
      common.descend(optimizer, tape, loss, model.trainable_variables)
      return loss

    parts = strategy.run(step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)

  found = [float(train_step(b)) for _ in range(2) for b in distributed]
  return [found, model.get_weights()]


def _clipped(loss):
  if loss > 1.0:  # AutoGraph converts it to `tf.cond`.
    loss = 1.0 + 0.5 * (loss - 1.0)
  return loss


def _powers(x):
  total = tf.zeros_like(x)
  for i in tf.range(3):
    total += x ** tf.cast(i, tf.float32)
  return total / tf.cast(len(x), tf.float32)


def _helpers():
  """Runs a step whose Python helpers AutoGraph must convert."""
  strategy, distributed = _distributed()
  weight = tf.Variable(tf.linspace(-1.0, 1.0, 64))

  def step(inputs):
    x, y = inputs
    rows = tf.linalg.matvec(tf.reshape(x, [-1, 64]), weight)
    parts = [_clipped(part) for part in tf.unstack(weight[:4])]
    # Replicas have different rows; the sums over rows add up.
    powers = _powers(tf.reduce_sum(rows)[None])
    return tf.reduce_sum(rows * tf.cast(y, tf.float32)), parts, powers * 0.0

  @tf.function
  def evaluate(inputs):
    total, parts, powers = strategy.run(step, args=(inputs,))
    reduce = strategy.reduce
    return (
      reduce(tf.distribute.ReduceOp.SUM, total, axis=None),
      [reduce(tf.distribute.ReduceOp.MEAN, p, axis=None) for p in parts],
      reduce(tf.distribute.ReduceOp.SUM, powers, axis=None),
    )

  return [
    [np.asarray(t) for t in tf.nest.flatten(evaluate(batch))]
    for batch in distributed
  ]


PROGRAMS = {
  'helpers': _helpers,
  'contrastive_loop': _contrastive,
  'custom_training': _custom_training,
  'loop_over_workers': _loop_over_workers,
}
