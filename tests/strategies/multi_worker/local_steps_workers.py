"""What the workers of `local_steps_test` run, and the same without workers.

`train` is a worker's job; `simulate` trains the workers of a job one after the other
in one process, with a copy of the model each and nothing of this package, and
computes meetings in NumPy.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import virtual_devices

FEATURES, CLASSES = 6, 3


@dataclasses.dataclass(frozen=True)
class Job:
  """A training by several workers.

  Attributes:
    every: steps between meetings; 0 trains synchronously.
    rows: of the data set.
    batch: rows of a batch of all workers.
    inner, outer: `keras.optimizers.get` makes them.
    layers: between the input and the logits: 'plain', 'normalized', 'dropout'.
    devices: of each worker.
    options: of `compile`.
    strategy: its name.
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


def data(job):
  """Rows of which no two are alike, and no worker's share like another's."""
  rng = np.random.default_rng(3)
  x = rng.normal(size=[job.rows, FEATURES]).astype(np.float32)
  x += np.linspace(-1, 1, job.rows, dtype=np.float32)[:, None]
  y = np.argmax(x[:, :CLASSES] * [1, 2, 3], -1).astype(np.int64)
  return x, y


def optimizer(which):
  """A new Keras optimizer from its name and options."""
  name, options = which
  return getattr(keras.optimizers, name)(**options)


def model_of(job, make_optimizer):
  """A compiled model, the same in each process."""
  keras.utils.set_random_seed(5)
  layers = [keras.Input([FEATURES]), keras.layers.Dense(8, 'tanh')]
  if job.layers == 'normalized':
    layers.append(keras.layers.BatchNormalization(momentum=0.5))
  if job.layers == 'dropout':
    layers.append(keras.layers.Dropout(0.5))
  model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(
    make_optimizer(), loss, metrics=['accuracy'], **dict(job.options)
  )
  return model


def dataset(job):
  """Batches of all workers, in order."""
  return tf.data.Dataset.from_tensor_slices(data(job)).batch(job.batch)


def local_steps(job):
  """The optimizer of a job."""
  if not job.every:
    return optimizer(job.inner)
  return tfs.keras.LocalSteps(
    optimizer(job.inner), job.every, optimizer(job.outer)
  )


def strategy_of(job):
  """A job's strategy, in one of its workers."""
  return tfs.create_strategy(
    job.strategy, devices=virtual_devices.names(job.devices)
  )


class Watch(keras.callbacks.Callback):
  """Notes weights, reports and bytes after each batch."""

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
  """What each of `jobs` gives on this worker."""
  del rank
  found = {}
  for name, job in jobs.items():
    strategy = strategy_of(job)
    with strategy.scope():
      model = model_of(job, lambda job=job: local_steps(job))
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
      'report': strategy.communication_report(),
    }
    if job.every:
      optimizer_ = model.optimizer
      while not isinstance(optimizer_, tfs.keras.LocalSteps):
        optimizer_ = optimizer_.inner_optimizer
      found[name]['outer'] = [v.numpy() for v in optimizer_.outer.variables]
      found[name]['anchors'] = [v.numpy() for v in optimizer_.anchors]
    strategy.close()
  return found


def simulate(job, workers, mutate=None):
  """The weights after a job; `mutate(name, value)` may change what a meeting uses."""
  mutate = mutate or (lambda name, value: value)
  models = [
    model_of(dataclasses.replace(job, options=()), lambda: optimizer(job.inner))
    for _ in range(workers)
  ]
  trained = len(models[0].trainable_variables)
  anchor = [v.numpy() for v in models[0].trainable_variables]
  momenta = [np.zeros_like(a) for a in anchor]
  _, options = job.outer
  seen = np.zeros(workers, np.int64)
  steps = 0

  def meet():
    share = mutate('share', seen / seen.sum())
    for i in range(trained):
      mine = [m.trainable_variables[i].numpy() for m in models]
      mean = sum(s * (anchor[i] - w) for s, w in zip(share, mine, strict=True))
      rate, momentum = options['learning_rate'], options.get('momentum', 0.0)
      momenta[i] = momentum * momenta[i] - rate * mean
      step = momenta[i]
      if options.get('nesterov'):
        step = momentum * momenta[i] - rate * mean
      new = (anchor[i] + step).astype(np.float32)
      anchor[i] = mutate('anchor', (anchor[i], new))[1]
      for model in models:
        model.trainable_variables[i].assign(new)
    for i in range(len(models[0].non_trainable_variables)):
      values = [m.non_trainable_variables[i].numpy() for m in models]
      if values[0].dtype.kind == 'f':
        mean = sum(s * v for s, v in zip(share, values, strict=True))
        for model in models:
          model.non_trainable_variables[i].assign(mean)
    seen[:] = 0

  for _ in range(job.epochs):
    for x, y in dataset(job):
      sizes = [
        len(x) // workers + (w < len(x) % workers) for w in range(workers)
      ]
      ends = np.cumsum(sizes)
      for model, end, size in zip(models, ends, sizes, strict=True):
        if size:
          model.train_on_batch(x[end - size : end], y[end - size : end])
      seen += sizes
      steps += 1
      if steps == job.every:
        meet()
        steps = 0
    if steps:
      meet()
      steps = 0
  return models[0].get_weights()


def one_device(job):
  """The weights that one device makes of a job without local steps."""
  model = model_of(job, lambda: optimizer(job.inner))
  history = model.fit(dataset(job), epochs=job.epochs, verbose=0).history
  return model.get_weights(), history


class _SaveAt(keras.callbacks.Callback):
  """Saves once, after some steps, and says how many there were since a meeting."""

  def __init__(self, checkpoint, step):
    super().__init__()
    self._checkpoint, self._step = checkpoint, step

  def on_train_batch_end(self, batch, logs=None):
    """See base class."""
    if batch + 1 == self._step:
      self._checkpoint.save(0, self._step)
      self.since_meeting = int(self.model.optimizer.steps.numpy())
      self.weights = self.model.get_weights()


def save_and_resume(rank, job, directory, step):
  """Trains an epoch, saving in the middle; then again, from there."""
  found = {}
  for name in ('whole', 'resumed'):
    strategy = strategy_of(job)
    with strategy.scope():
      model = model_of(job, lambda: local_steps(job))
    checkpoint = tfs.RunCheckpoint(directory, model)
    callback = _SaveAt(checkpoint, step)
    if name == 'resumed':
      checkpoint.restore()
      found['since_meeting'] = int(model.optimizer.steps.numpy())
      found['restored'] = model.get_weights()
      callback = tfs.ResumeFit(checkpoint)
    history = model.fit(
      dataset(job), epochs=1, verbose=0, callbacks=[callback]
    ).history
    state = [v.numpy() for v in model.optimizer.variables]
    found[name] = model.get_weights(), state, history
    if name == 'whole':
      found['saved'] = callback.since_meeting, callback.weights
    strategy.close()
  return found
