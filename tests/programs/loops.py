"""Loops of one's own, which ask TensorFlow for the strategy of their scope.

In the structure of TensorFlow's tutorials, and small enough for seconds. Without
a strategy `tf.distribute.get_strategy()` is one device. The last batch has 14 rows.
"""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

layers, losses = keras.layers, keras.losses
_ROWS = 78  # Two batches of 32, and one of 14.
_CLASSES = 4
_BATCH = 32


def _data():
  rng = np.random.default_rng(18)
  x = rng.normal(size=(_ROWS, 8, 8, 1)).astype('f4')
  return x, rng.integers(0, _CLASSES, _ROWS)


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
  """As "Custom training with tf.distribute.Strategy": average loss, metrics, a test."""
  strategy = tf.distribute.get_strategy()
  dataset = tf.data.Dataset.from_tensor_slices(_data()).batch(_BATCH)
  distributed = strategy.experimental_distribute_dataset(dataset)
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
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(
      zip(gradients, model.trainable_variables, strict=True)
    )
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
  """As "Custom training loop with Keras and MultiWorkerMirroredStrategy".

  Data from a function that each worker calls, an epoch in one `tf.function`, and
  checkpoints, from which a second model goes on.
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
      weights = model.trainable_variables
      gradients = tape.gradient(loss, weights)
      optimizer.apply_gradients(zip(gradients, weights, strict=True))
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


PROGRAMS = {
  'custom_training': _custom_training,
  'loop_over_workers': _loop_over_workers,
}
