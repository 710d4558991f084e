"""A coordinator's side of `embeddings`: a table on servers, three ways to train it."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from benchmarks.parameter_server_peers import catalogue, loops, meter

# So few batches that rows come again, and the loss falls.
_NUM_BATCHES = 16
_RATE = 0.05
# A mean over a batch has a small gradient in each row.
_SGD_RATE = 0.5
_EPSILON = 1e-7
_BETA_1, _BETA_2 = 0.9, 0.999


def batches(rows: int, batch_rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Ids of rows of the table, [batches, batch_rows], and what is learnt of them."""
  shape = (_NUM_BATCHES, batch_rows)
  ids = np.random.default_rng(7).integers(0, rows, shape)
  return ids, (ids % 8 > 0)[..., None].astype(np.float32)


def unique_rows(rows: int, batch_rows: int) -> float:
  """How many different rows a batch uses, the mean."""
  ids, _ = batches(rows, batch_rows)
  return float(np.mean([len(np.unique(batch)) for batch in ids]))


def _dataset(rows, batch_rows):
  data = tf.data.Dataset.from_tensor_slices(batches(rows, batch_rows))
  return data.repeat().prefetch(4)


def _model(rows, width):
  keras.utils.set_random_seed(1)
  return keras.Sequential(
    [
      keras.Input([], dtype='int64'),
      keras.layers.Embedding(rows, width, name='table'),
      keras.layers.Dense(1, name='score'),
    ]
  )


def _loss(labels, scores):
  return tf.reduce_mean(
    tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=scores)
  )


class Coordinator:
  """The only coordinator of a cluster; `pool_worker` calls the methods.

  Args:
    rank: always 0.
  """

  def __init__(self, rank: int):
    del rank

  def connect(
    self,
    peer: Mapping[str, Any],
    cluster: Mapping[str, Sequence[str]],
    pids: Mapping[str, Sequence[int]],
  ) -> None:
    """Connects to the servers; arguments as of `coordinator.Coordinator`."""
    self._clocks = meter.Meter(dict(pids))
    entry = catalogue.Peer(**peer)
    make = {'ours': _Fit, 'by_hand': _ByHand, 'stock_keras': _StockKeras}
    self._loop = make[entry.name](entry, cluster)

  def set_up(
    self, rows: int, width: int, optimizer: str, batch_rows: int
  ) -> None:
    """Makes the table on the servers, and what trains it."""
    self._loop.build_table(rows, width, optimizer, batch_rows)

  def run(self, blocks: int, steps: int) -> dict[str, Any]:
    """Trains on: a block to warm up, and those that count.

    Returns:
      `samples` of the meter, one a block, and the mean `losses` of all blocks.
    """
    self._loop.losses = []
    readings = self._loop.train(1 + blocks, steps, self._clocks)
    samples = [meter.between(start, end) for start, end in readings[1:]]
    return {'samples': samples, 'losses': self._loop.losses}

  def release(self) -> None:
    """Forgets the table."""
    self._loop.release()
    keras.backend.clear_session()
    gc.collect()


class _Fit(loops.FitLoop):
  """Keras's `Embedding` and optimizers in `fit`, under ours."""

  def build_table(self, rows, width, optimizer, batch_rows):
    """Compiles the model."""
    with self.strategy.scope():
      self.model = _model(rows, width)
      applied = _keras_optimizer(optimizer)
      if optimizer == 'adam':
        applied = tfs.keras.LazyRows(applied)
      self.model.compile(applied, _loss, jit_compile=False)
      self.optimizer = self.model.optimizer
      self.optimizer.build(self.model.trainable_variables)
    self._data = self.strategy.distribute_datasets_from_function(
      lambda context: _dataset(rows, batch_rows)
    )

  def fit(self, epochs, steps, callback):
    """Notes the mean loss of each epoch."""
    history = self.model.fit(
      self._data,
      epochs=epochs,
      steps_per_epoch=steps,
      verbose=0,
      callbacks=[callback],
    )
    self.losses += history.history['loss']


class _Stock(loops.StockLoop):
  """TensorFlow's strategy; a subclass says what a step is."""

  def build_table(self, rows, width, optimizer, batch_rows):
    """Traces a step, and lets each worker make its data set."""
    with self.strategy.scope():
      step_of_replica = self.step_of(rows, width, optimizer)

    @tf.function
    def step(iterator):
      return self.strategy.run(step_of_replica, args=next(iterator))

    self._step = step
    self._data = iter(
      self._coordinator.create_per_worker_dataset(
        lambda: _dataset(rows, batch_rows)
      )
    )

  def train(self, blocks, steps, clocks):
    """A block is what is scheduled between two joins."""
    readings = []
    for _ in range(blocks):
      start = clocks.read()
      results = [
        self._coordinator.schedule(self._step, args=(self._data,))
        for _ in range(steps)
      ]
      self._coordinator.join()
      readings.append((start, clocks.read()))
      self.losses.append(float(np.mean([r.fetch() for r in results])))
    return readings


class _StockKeras(_Stock):
  """Keras's `Embedding` and optimizers in a loop by hand."""

  def step_of(self, rows, width, optimizer):
    """The step of Keras's guide."""
    model = self.model = _model(rows, width)
    applied = self.optimizer = _keras_optimizer(optimizer)
    applied.build(model.trainable_variables)

    def step(ids, labels):
      with tf.GradientTape() as tape:
        loss = _loss(labels, model(ids, training=True))
      gradients = tape.gradient(loss, model.trainable_variables)
      applied.apply_gradients(
        zip(gradients, model.trainable_variables, strict=True)
      )
      return loss

    return step


class _ByHand(_Stock):
  """`tf.Variable`, `tf.nn.embedding_lookup`, and updates of rows on the server."""

  def step_of(self, rows, width, optimizer):
    """A lookup of the different rows, and an update of each."""
    table = tf.Variable(
      tf.random.stateless_uniform([rows, width], [1, 1], -0.05, 0.05)
    )
    kernel = tf.Variable(tf.random.stateless_normal([width, 1], [2, 2], 0, 0.1))
    bias = tf.Variable(tf.zeros([1]))
    variables = [table, kernel, bias]
    count = {'sgd': 0, 'adagrad': 1, 'adam': 2}[optimizer]
    start = 0.1 if optimizer == 'adagrad' else 0.0
    slots = []
    for v in variables:
      with self.strategy.extended.colocate_vars_with(v):
        slots.append(
          [tf.Variable(tf.fill(v.shape, start)) for _ in range(count)]
        )
    steps = tf.Variable(0, dtype=tf.int64)
    self._kept = [variables, slots, steps]

    def step(ids, labels):
      unique, positions = tf.unique(ids)
      # One lookup of each row; what is learnt of it comes back as one row.
      found = tf.nn.embedding_lookup(table, unique)
      with tf.GradientTape() as tape:
        tape.watch(found)
        scores = tf.gather(found, positions) @ kernel + bias
        loss = _loss(labels, scores)
      rows_gradient, *dense = tape.gradient(loss, [found, kernel, bias])
      rows_gradient = tf.convert_to_tensor(rows_gradient)
      now = tf.cast(steps.assign_add(1), tf.float32)
      for v, s, gradient, indices in zip(
        variables,
        slots,
        [rows_gradient, *dense],
        [unique, None, None],
        strict=True,
      ):
        with tf.device(v.device):
          _UPDATES[optimizer](v, s, gradient, indices, now)
      return loss

    return step


def _sgd(variable, slots, gradient, indices, now):
  del slots, now
  if indices is None:
    variable.assign_sub(_SGD_RATE * gradient)
  else:
    variable.scatter_sub(tf.IndexedSlices(_SGD_RATE * gradient, indices))


def _adagrad(variable, slots, gradient, indices, now):
  del now
  [total] = slots
  if indices is None:
    new = total.assign_add(gradient**2)
    variable.assign_sub(_RATE * gradient / tf.sqrt(new + _EPSILON))
    return
  tf.raw_ops.ResourceSparseApplyAdagradV2(
    var=variable.handle,
    accum=total.handle,
    lr=_RATE,
    epsilon=_EPSILON,
    grad=gradient,
    indices=indices,
  )


def _adam(variable, slots, gradient, indices, now):
  rate = _RATE * tf.sqrt(1 - _BETA_2**now) / (1 - _BETA_1**now)
  if indices is None:
    indices = tf.range(tf.shape(variable)[0])
  new = []
  for slot, value, beta in zip(
    slots, (gradient, gradient**2), (_BETA_1, _BETA_2), strict=True
  ):
    old = tf.gather(slot, indices)
    new.append(old + (value - old) * (1 - beta))
    slot.scatter_update(tf.IndexedSlices(new[-1], indices))
  change = rate * new[0] / (tf.sqrt(new[1]) + _EPSILON)
  variable.scatter_sub(tf.IndexedSlices(change, indices))


_UPDATES = {'sgd': _sgd, 'adagrad': _adagrad, 'adam': _adam}


def _keras_optimizer(name):
  if name == 'sgd':
    return keras.optimizers.SGD(_SGD_RATE)
  optimizers = keras.optimizers
  return {'adagrad': optimizers.Adagrad, 'adam': optimizers.Adam}[name](_RATE)
