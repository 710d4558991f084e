"""The workers of `local_steps_test`, and a simulation without workers.

`train` is a worker's job. `simulate` trains the workers of a job in turn in one
process. Each has its own copy of the model. The simulation uses nothing from this
package.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import virtual_devices

virtual_devices.configure()

FEATURES, CLASSES = 6, 3


@dataclasses.dataclass(frozen=True)
class Job:
  """A training run on several workers.

  Attributes:
    every: number of steps between synchronizations. 0 trains synchronously.
    rows: number of rows in the data set.
    batch: number of rows in a batch of all workers.
    inner, outer: optimizers, as (name, options).
    layers: layers between input and logits: 'plain', 'normalized' or 'dropout'.
    devices: number of devices of each worker.
    options: options of `compile`.
    strategy: name of the strategy.
    policy: dtype policy. With 'mixed_float16', rows of the last worker overflow once.
    has_own_step: whether the model overrides `train_step`.
  """

  every: int
  rows: int = 48
  batch: int = 12
  epochs: int = 2
  inner: tuple = ('SGD', {'learning_rate': 0.1})
  outer: tuple = ('SGD', {'learning_rate': 1.0})
  layers: str = 'plain'
  devices: int = 1
  options: tuple = ()
  strategy: str = 'multi_worker_ring'
  policy: str = 'float32'
  has_own_step: bool = False


def largest(a, b):
  """Returns the largest difference between two lists of arrays."""
  return max(np.max(np.abs(x - y)) for x, y in zip(a, b, strict=True))


def data(job):
  """Returns rows that all differ. Workers' shares also differ."""
  rng = np.random.default_rng(3)
  x = rng.normal(size=[job.rows, FEATURES]).astype(np.float32)
  x += np.linspace(-1, 1, job.rows, dtype=np.float32)[:, None]
  if job.policy == 'mixed_float16':
    x[job.batch - 1] = 1e30
  y = np.argmax(x[:, :CLASSES] * [1, 2, 3], -1).astype(np.int64)
  return x, y


def optimizer(which):
  """Returns a new Keras optimizer, given its name and options."""
  name, options = which
  return getattr(keras.optimizers, name)(**options)


class OwnStep(keras.Sequential):
  """A model whose `train_step` also returns a value that is not a metric."""

  def train_step(self, data):
    """See base class."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
      loss = self.compute_loss(x, y, self(x, training=True))
    variables = self.trainable_variables
    self.optimizer.apply(tape.gradient(loss, variables), variables)
    return {'loss': loss, 'rows': tf.shape(x)[0]}


def model_of(job, make_optimizer):
  """Returns a compiled model, identical in each process."""
  keras.utils.set_random_seed(5)
  keras.config.set_dtype_policy(job.policy)
  layers = [keras.Input([FEATURES]), keras.layers.Dense(8, 'tanh')]
  if job.layers == 'normalized':
    layers.append(keras.layers.BatchNormalization(momentum=0.5))
  if job.layers == 'dropout':
    layers.append(keras.layers.Dropout(0.5))
  kind = OwnStep if job.has_own_step else keras.Sequential
  model = kind([*layers, keras.layers.Dense(CLASSES, dtype='float32')])
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  metrics = None if job.has_own_step else ['accuracy']
  model.compile(make_optimizer(), loss, metrics=metrics, **dict(job.options))
  keras.config.set_dtype_policy('float32')
  return model


def dataset(job):
  """Returns the batches of all workers, in order."""
  return tf.data.Dataset.from_tensor_slices(data(job)).batch(job.batch)


def local_steps(job):
  """Returns the optimizer of a job."""
  if not job.every:
    return optimizer(job.inner)
  return tfs.keras.LocalSteps(
    optimizer(job.inner), job.every, optimizer(job.outer)
  )


def start(job, change=lambda optimizer: optimizer, **options):
  """Returns a worker's strategy with these options, and the model to train.

  `change` gets the optimizer of the job and returns the model's.
  """
  devices = virtual_devices.names(job.devices)
  strategy = tfs.create_strategy(job.strategy, devices=devices, **options)
  with strategy.scope():
    return strategy, model_of(job, lambda: change(local_steps(job)))


class Watch(keras.callbacks.Callback):
  """Records weights, logs and bytes after each batch."""

  def __init__(self, strategy):
    super().__init__()
    self._strategy = strategy
    self.weights, self.logs, self.calls = [], [], []

  def on_train_batch_end(self, batch, logs=None):
    """See base class."""
    self.weights.append(self.model.get_weights())
    self.logs.append({k: float(v) for k, v in logs.items()})
    calls = self._strategy.communication_report()['calls']
    self.calls.append(sum(calls.values()))


def train(rank, jobs):
  """Returns the results of each of `jobs` on this worker."""
  del rank
  found = {}
  for name, job in jobs.items():
    strategy, model = start(job)
    watch = Watch(strategy)
    history = model.fit(
      dataset(job), epochs=job.epochs, verbose=0, callbacks=[watch]
    ).history
    evaluation = model.evaluate(dataset(job), verbose=0, return_dict=True)
    found[name] = {
      'weights': model.get_weights(),
      'history': history,
      'evaluation': evaluation,
      'watch': (watch.weights, watch.logs, watch.calls),
      'iterations': int(model.optimizer.iterations.numpy()),
    }
    if job.every:
      optimizer_ = model.optimizer
      while not isinstance(optimizer_, tfs.keras.LocalSteps):
        optimizer_ = optimizer_.inner_optimizer
      found[name]['outer'] = [v.numpy() for v in optimizer_.outer.variables]
      found[name]['anchors'] = [v.numpy() for v in optimizer_.anchors]
    strategy.close()
  return found


def simulate(job, workers, synchronizes_at_epochs=True):
  """Returns the weights after a job, without workers."""
  models = [
    model_of(dataclasses.replace(job, options=()), lambda: optimizer(job.inner))
    for _ in range(workers)
  ]
  anchors = [keras.Variable(v.numpy()) for v in models[0].trainable_variables]
  outer = optimizer(job.outer)
  seen = np.zeros(workers, np.int64)
  steps = 0

  def mean(same):
    """Returns the mean of the workers' variables, weighted by their rows."""
    shares = zip(seen / seen.sum(), same, strict=True)
    return sum(share * v.numpy() for share, v in shares)

  def synchronize():
    if not seen.any():
      return
    trained = list(zip(*(m.trainable_variables for m in models), strict=True))
    differences = [
      np.float32(anchor.numpy() - mean(same))
      for anchor, same in zip(anchors, trained, strict=True)
    ]
    outer.apply(differences, anchors)
    for anchor, same in zip(anchors, trained, strict=True):
      for variable in same:
        variable.assign(anchor)
    for same in zip(*map(_averaged, models), strict=True):
      value = mean(same)
      for variable in same:
        variable.assign(value)
    seen[:] = 0

  for epoch in range(job.epochs):
    for x, y in dataset(job):
      for w, model in enumerate(models):
        mine = rows_of(w, len(x), workers, job.devices)
        if len(mine):
          model.train_on_batch(x.numpy()[mine], y.numpy()[mine])
        seen[w] += len(mine)
      steps += 1
      if steps == job.every:
        synchronize()
        steps = 0
    if steps and (synchronizes_at_epochs or epoch == job.epochs - 1):
      synchronize()
      steps = 0
  models[0].optimizer.finalize_variable_values(models[0].trainable_variables)
  return models[0].get_weights()


def rows_of(worker, count, workers, devices):
  """Returns the rows of a batch that a worker gets, in one part for each device."""
  parts = np.array_split(np.arange(count), workers * devices)
  return np.concatenate(parts[worker * devices : (worker + 1) * devices])


def _averaged(model):
  """Returns the variables that are averaged in addition to weights."""
  averages = [v for v in model.non_trainable_variables if 'moving_' in v.name]
  optimizer_ = model.optimizer
  return averages + getattr(optimizer_, '_model_variables_moving_average', [])


class _SaveAt(keras.callbacks.Callback):
  """Saves once after some steps, and records the position."""

  def __init__(self, checkpoint, step):
    super().__init__()
    self._checkpoint, self._step = checkpoint, step

  def on_train_batch_end(self, batch, logs=None):
    """See base class."""
    if batch + 1 == self._step:
      self._checkpoint.save(0, self._step)
      self.saved = _position(self.model)


def _position(model):
  """Returns the number of steps since a synchronization, and the weights."""
  return int(model.optimizer.steps.numpy()), model.get_weights()


def save_and_resume(rank, job, directory, step):
  """Trains an epoch and saves in the middle, then resumes from there."""
  found = {}
  for name in ('whole', 'resumed'):
    strategy, model = start(job)
    checkpoint = tfs.Run(directory, model)
    callback = _SaveAt(checkpoint, step)
    if name == 'resumed':
      checkpoint.restore()
      found['restored'] = _position(model)
      callback = checkpoint
    history = model.fit(
      dataset(job), epochs=1, verbose=0, callbacks=[callback]
    ).history
    state = [v.numpy() for v in model.optimizer.variables]
    found[name] = model.get_weights(), state, history
    if name == 'whole':
      found['saved'] = callback.saved
    strategy.close()
  return found


def replace_optimizer(rank, job):
  """Trains apart for two steps, then with an optimizer without local steps.

  Returns the weights before the optimizer is replaced, and the final weights with and
  without a synchronization before.
  """
  del rank
  found = {}
  for name in ('unsynchronized', 'synchronized'):
    strategy, model = start(job)
    *first, last = dataset(job).take(3).as_numpy_iterator()
    for x, y in first:
      model.train_on_batch(x, y)
    found['apart'] = model.get_weights()
    if name == 'synchronized':
      model.optimizer.meet()
    with strategy.scope():
      model.compile(optimizer(job.inner), model.loss)
    model.train_on_batch(*last)
    found[name] = model.get_weights()
    strategy.close()
  return found


def loop(rank, job):
  """Does the same as `train` in a loop that calls `strategy.step`, with loss scaling.

  Returns the weights, and the number of collectives after each step.
  """
  del rank
  strategy, model = start(
    job, lambda inner: keras.optimizers.LossScaleOptimizer(inner, 8.0)
  )

  def train_step(x, y):
    with tf.GradientTape() as tape:
      losses = keras.losses.sparse_categorical_crossentropy(
        y, model(x, training=True), from_logits=True
      )
      loss = model.optimizer.scale_loss(tf.reduce_mean(losses))
    variables = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, variables), variables)

  step = strategy.step(train_step, [model.optimizer])
  batches = strategy.experimental_distribute_dataset(
    dataset(job).take(job.rows // job.batch)
  )
  calls = []
  for _ in range(job.epochs):
    for x, y in batches:
      step(x, y)
      calls.append(sum(strategy.communication_report()['calls'].values()))
  model.optimizer.inner_optimizer.meet()
  found = {'weights': model.get_weights(), 'calls': calls}
  strategy.close()
  return found
