"""What the MNIST examples share: devices, strategy and data."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

import tf_strategies as tfs
from examples import common_flags, datasets

_ALL_REDUCES = {
  'ring': tfs.RingAllReduce,
  'auto': tfs.AutoAllReduce,
  'direct': tfs.DirectAllReduce,
  'tree': tfs.TreeAllReduce,
  'halving_doubling': tfs.HalvingDoublingAllReduce,
  'hierarchical': tfs.HierarchicalRingAllReduce,
  'naive': tfs.NaiveAllReduce,
}

# TensorFlow wants a limit for each virtual GPU. Two gigabytes fit these models
# many times over, and eight of them a 16 GB card.
_VIRTUAL_GPU_MEGABYTES = 2048

# Evaluation keeps no activations for a backward pass: larger batches are free.
_EVALUATION_BATCH_SIZE = 512


def split_device(count: int) -> list[str] | None:
  """Splits the first GPU, or the CPU, into `count` logical devices.

  Args:
    count: how many; 0 leaves the devices as they are.

  Returns:
    Their names, or None for a count of 0.

  Raises:
    UnsupportedOptionError: TensorFlow runs already, with other devices.
  """
  if not count:
    return None
  gpus = tf.config.list_physical_devices('GPU')
  physical = gpus[0] if gpus else tf.config.list_physical_devices('CPU')[0]
  limit = _VIRTUAL_GPU_MEGABYTES if gpus else None
  parts = [
    tf.config.LogicalDeviceConfiguration(memory_limit=limit)
    for _ in range(count)
  ]
  try:
    tf.config.set_logical_device_configuration(physical, parts)
  except RuntimeError as e:
    raise tfs.errors.UnsupportedOptionError(
      f'num_virtual_devices={count} after TensorFlow has started',
      'a split before the first operation',
      'call split_device first',
    ) from e
  return [f'{physical.device_type}:{i}' for i in range(count)]


def create_all_reduce(
  options: common_flags.TrainingOptions,
) -> tf.distribute.CrossDeviceOps | None:
  """Returns the chosen all-reduce; None where the strategy takes none."""
  if (
    options.strategy not in ('ring_mirrored', 'mirrored')
    or options.all_reduce == 'builtin'
  ):
    return None
  return _ALL_REDUCES[options.all_reduce]()


def create_strategy(
  options: common_flags.TrainingOptions,
  devices: Sequence[str] | None,
  all_reduce: tf.distribute.CrossDeviceOps | None,
) -> tf.distribute.Strategy:
  """Returns the strategy of the options.

  Args:
    options: `strategy` of them.
    devices: names of the devices to use; None for all.
    all_reduce: as `create_all_reduce` returns it.

  Raises:
    UnsupportedOptionError: a strategy that another example is for, or one that
      lacks its devices.
  """
  if options.strategy == 'parameter_server':
    raise tfs.errors.UnsupportedOptionError(
      "strategy='parameter_server' in this example",
      'a strategy whose processes all train: servers only serve',
      'run python -m examples.mnist_parameter_server',
    )
  arguments = {'devices': devices}
  if all_reduce is not None:
    arguments['cross_device_ops'] = all_reduce
  return tfs.create_strategy(options.strategy, **arguments)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingData:
  """Batches for training and evaluation.

  Attributes:
    source: the arrays that the batches are made of.
    global_batch_size: examples of a training step over all replicas.
    steps_per_epoch: training steps of each epoch, more or fewer than a pass
      over the data takes: the next epoch goes on where one ended.
    seed: decides, together with its number, the order of a pass.
    full_batches: whether all batches are full, cut out of the stream of passes
      without regard to their ends.
  """

  source: datasets.ImageClassificationData
  global_batch_size: int
  steps_per_epoch: int
  seed: int
  full_batches: bool = False

  @property
  def test_steps(self) -> int:
    """Batches of the test split."""
    return math.ceil(self.source.test.num_examples / _EVALUATION_BATCH_SIZE)

  def train(
    self,
    strategy: tf.distribute.Strategy,
    first_epoch: int,
    num_epochs: int,
    first_step: int = 0,
  ):
    """The batches of epochs first_epoch, ..., num_epochs - 1, in a row.

    The order of a pass is a function of (seed, pass) alone, so a run that was
    interrupted, in or after an epoch, sees what it would have seen.
    """
    return _distribute(
      strategy, self._batches(first_epoch, num_epochs, first_step)
    )

  def train_on_workers(
    self,
    strategy: tf.distribute.Strategy,
    first_epoch: int,
    num_epochs: int,
    first_step: int = 0,
  ):
    """The same batches, of which each worker reads its share itself."""

    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
      return self._batches(first_epoch, num_epochs, first_step, context)

    return strategy.distribute_datasets_from_function(read)

  def _batches(
    self, first_epoch, num_epochs, first_step, context=None
  ) -> tf.data.Dataset:
    return tfs.data.make_dataset(
      self.source.train,
      tfs.data.PipelineOptions(
        self.global_batch_size,
        seed=self.seed,
        drop_remainder=self.full_batches,
      ),
      training=True,
      epochs=num_epochs,
      start=(first_epoch, first_step),
      steps_per_epoch=self.steps_per_epoch,
      input_context=context,
    )

  def in_groups_of(self, steps: int) -> TrainingData:
    """The same data, with a multiple of `steps` as steps_per_epoch.

    Of a group that does not fit into an epoch, Keras (`steps_per_execution`)
    would take the rest from the next one.

    Raises:
      DataError: an epoch has fewer steps than a group.
    """
    groups = self.steps_per_epoch // steps
    if not groups:
      raise tfs.errors.DataError(
        f'{self.steps_per_epoch} steps an epoch make no group of {steps}; '
        f'expected steps_per_execution={self.steps_per_epoch} at most'
      )
    left_out = self.steps_per_epoch - groups * steps
    if left_out:
      print(
        f'An epoch has {left_out} steps less, which make no group of {steps}; '
        'the next epoch begins with them.'
      )
    return dataclasses.replace(self, steps_per_epoch=groups * steps)

  def test(self, strategy: tf.distribute.Strategy):
    """The batches of the whole test split, in order."""
    batches = tfs.data.make_dataset(
      self.source.test,
      tfs.data.PipelineOptions(_EVALUATION_BATCH_SIZE),
      training=False,
    )
    return _distribute(strategy, batches)

  def rows_in_step(self, step: int, epoch: int = 0) -> int:
    """Examples in a step, counted from 0: the last of a pass has fewer."""
    if self.full_batches:
      return self.global_batch_size
    num_examples = self.source.train.num_examples
    steps_per_pass = math.ceil(num_examples / self.global_batch_size)
    step = (epoch * self.steps_per_epoch + step) % steps_per_pass
    left = num_examples - step * self.global_batch_size
    return min(self.global_batch_size, left)


def _distribute(strategy, batches: tf.data.Dataset):
  if isinstance(strategy, tfs.ParameterServerStrategy):
    return batches  # Its chief hands out whole batches, of any data set.
  return strategy.experimental_distribute_dataset(batches)


def load_data(
  options: common_flags.TrainingOptions, num_replicas: int
) -> TrainingData:
  """Loads the data set of the options and plans its epochs.

  TensorFlow's own mirrored strategy gets full batches only: a replica with
  fewer rows would count too much, and one without rows can abort the process
  (the gradient of max pooling).

  Raises:
    DataError: the data are missing, damaged, or less than one batch.
  """
  source = datasets.load(options.dataset, options.data_path)
  num_examples = source.train.num_examples
  size = options.global_batch_size
  full_steps = num_examples // size
  steps = math.ceil(num_examples / size)
  full_batches = options.strategy == 'mirrored' and num_replicas > 1
  if full_batches:
    if not full_steps:
      raise tfs.errors.DataError(
        f'{num_examples} examples make no full batch of {size}; expected at '
        "least one with strategy='mirrored', pass a smaller global_batch_size"
      )
    if full_steps < steps:
      print(
        f'mirrored: the last {num_examples - full_steps * size} examples make '
        'no full batch; the next epoch begins with them.'
      )
    steps = full_steps
  return TrainingData(
    source=source,
    global_batch_size=size,
    steps_per_epoch=options.steps_per_epoch or steps,
    seed=options.seed,
    full_batches=full_batches,
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
  """What there is before a model: the same in every example.

  Attributes:
    options: as the flags gave them.
    strategy: how the replicas work together.
    all_reduce: the op that counts its calls; None if it is none of ours.
    data: the batches.
    monitor: measures the steps; None if nobody wants to know.
  """

  options: common_flags.TrainingOptions
  strategy: tf.distribute.Strategy
  all_reduce: tf.distribute.CrossDeviceOps | None
  data: TrainingData
  monitor: tfs.monitoring.TrainingMonitor | None = None

  @property
  def num_replicas(self) -> int:
    """Replicas that share a global batch."""
    return self.strategy.num_replicas_in_sync

  @property
  def is_chief(self) -> bool:
    """Whether this process shows progress and writes files.

    Of several workers that is the first. What is read from metrics must be read
    on all of them: each has a part.
    """
    return self.strategy.extended.should_checkpoint

  def measured_step(self) -> contextlib.AbstractContextManager[None]:
    """Context of one training step, for the monitor if there is one."""
    return self.monitor.step() if self.monitor else contextlib.nullcontext()

  def still_alive(self) -> None:
    """Tells the monitor, if there is one, of work that is not a step."""
    if self.monitor:
      self.monitor.still_alive()

  def join(self) -> None:
    """Waits for steps that workers still run, where steps run on workers."""
    if hasattr(self.strategy, 'join'):
      self.strategy.join()


def set_up(
  options: common_flags.TrainingOptions,
  devices: Sequence[str] | None,
  strategy: tf.distribute.Strategy | None = None,
) -> Setup:
  """Makes the strategy, loads the data and seeds the random numbers.

  Initial weights then depend on the seed alone, not on the number of replicas.

  Args:
    options: as the flags gave them.
    devices: names of the devices to use; None for all.
    strategy: to use instead of the options'.

  Raises:
    UnsupportedOptionError: as `create_strategy`.
    DataError: as `load_data`.
  """
  all_reduce = create_all_reduce(options)
  if strategy is None:
    strategy = create_strategy(options, devices, all_reduce)
  # Before data are distributed: their pipeline says how long a step waits.
  wanted = options.monitor_options()
  monitor = tfs.monitoring.TrainingMonitor(wanted) if wanted else None
  data = load_data(options, strategy.num_replicas_in_sync)
  keras.utils.set_random_seed(options.seed)
  keras.config.set_dtype_policy(
    'float32' if options.mixed_precision == 'none' else options.mixed_precision
  )
  return Setup(options, strategy, all_reduce, data, monitor)
