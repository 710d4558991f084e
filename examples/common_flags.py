"""The flags that every example has, and the options object they become.

Flags are defined by a call, not on import, so that a test can import two
examples, or parse flags into a `FlagValues` of its own.

Example:

  >>> from absl import flags
  >>> flag_values = flags.FlagValues()
  >>> define(flag_values)
  >>> _ = flag_values(['program', '--dataset=digits', '--optimizer=adam'])
  >>> options = parse(flag_values)
  >>> options.epochs, options.global_batch_size, options.learning_rate
  (12, 64, 0.001)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from absl import flags

import tf_strategies as tfs

ALL_REDUCES = (
  'ring',
  'auto',
  'direct',
  'tree',
  'halving_doubling',
  'hierarchical',
  'naive',
  'builtin',
)
PRECISIONS = ('none', 'mixed_float16', 'mixed_bfloat16')

# Enough for 97% on digits and 98.5% on MNIST; synthetic data are for speed.
_EPOCHS = {'mnist': 3, 'digits': 12, 'synthetic': 1}
_GLOBAL_BATCH_SIZE = {'mnist': 64, 'digits': 64, 'synthetic': 128}
_LEARNING_RATE = {'sgd': 0.02, 'adam': 1e-3}


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
  """What a run trains and how; one field a flag of the same name.

  None in `epochs`, `global_batch_size` and `learning_rate` becomes the
  default of the data set or the optimizer.

  Raises:
    UnsupportedOptionError: options that contradict each other.
  """

  strategy: str = 'ring_mirrored'
  elastic: bool = False
  min_workers: int = 1
  all_reduce: str = 'ring'
  dataset: str = 'mnist'
  data_path: str | None = None
  model: str = 'cnn'
  dropout: float = 0.0
  global_batch_size: int | None = None
  epochs: int | None = None
  steps_per_epoch: int | None = None
  optimizer: str = 'sgd'
  learning_rate: float | None = None
  scale_learning_rate: bool = False
  warmup_steps: int = 0
  mixed_precision: str = 'none'
  checkpoint_dir: str | None = None
  log_dir: str | None = None
  metrics_jsonl: str | None = None
  timeline: str | None = None
  profile_steps: Sequence[str] | None = None
  watchdog_seconds: float | None = None
  save_weights: str | None = None
  seed: int = 0
  verbose: bool = True
  log_every_steps: int = 50

  def __post_init__(self):
    self._default('epochs', _EPOCHS[self.dataset])
    self._default('global_batch_size', _GLOBAL_BATCH_SIZE[self.dataset])
    self._default('learning_rate', _LEARNING_RATE[self.optimizer])
    if self.elastic and self.strategy != 'multi_worker_ring':
      raise tfs.errors.UnsupportedOptionError(
        f'elastic with strategy={self.strategy!r}',
        "strategy='multi_worker_ring', whose ring can form again",
        "write strategy='multi_worker_ring', or leave elastic out",
      )
    if self.elastic and self.checkpoint_dir:
      raise tfs.errors.UnsupportedOptionError(
        'elastic with checkpoint_dir',
        'one of them: an elastic run keeps its state in its workers',
        'leave one out',
      )
    self.monitor_options()
    if self.all_reduce == 'builtin' and self.strategy != 'mirrored':
      raise tfs.errors.UnsupportedOptionError(
        f"all_reduce='builtin' with strategy={self.strategy!r}",
        "TensorFlow's own all-reduce with strategy='mirrored' only",
        "write strategy='mirrored', or choose another all_reduce",
      )

  def monitor_options(self) -> tfs.monitoring.MonitorOptions | None:
    """What is measured of the steps; None if nothing is.

    Raises:
      UnsupportedOptionError: steps to profile that are none.
    """
    steps = tfs.monitoring.parse_steps(self.profile_steps)
    paths = (self.log_dir, self.metrics_jsonl, self.timeline)
    if not (any(paths) or steps or self.watchdog_seconds):
      return None
    arguments = {}
    if self.watchdog_seconds is not None:
      arguments['watchdog_seconds'] = self.watchdog_seconds
    if not self.verbose:
      arguments['progress_seconds'] = 0.0
    return tfs.monitoring.MonitorOptions(
      *paths, steps, global_batch_size=self.global_batch_size, **arguments
    )

  def _default(self, name: str, value):
    if not getattr(self, name):
      object.__setattr__(self, name, value)


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the flags of every example whose strategy is an option."""
  _define_strategy(flag_values)
  define_run(flag_values)


def define_run(flag_values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the flags of data, training and output alone."""
  _define_data(flag_values)
  _define_training(flag_values)
  _define_output(flag_values)
  _define_monitoring(flag_values)


def parse(
  flag_values: flags.FlagValues = flags.FLAGS,
  options_class: type[TrainingOptions] = TrainingOptions,
) -> TrainingOptions:
  """Returns the options that the parsed flags describe.

  Args:
    flag_values: parsed.
    options_class: what to return; its fields without a flag keep their default.

  Raises:
    UnsupportedOptionError: as `options_class`.
  """
  return options_class(
    **{
      field.name: flag_values[field.name].value
      for field in dataclasses.fields(options_class)
      if field.name in flag_values
    }
  )


def _define_strategy(flag_values) -> None:
  flags.DEFINE_enum(
    'strategy',
    'ring_mirrored',
    tfs.STRATEGY_NAMES,
    'How the replicas work together.',
    flag_values=flag_values,
  )
  flags.DEFINE_bool(
    'elastic',
    False,
    'With multi_worker_ring: go on with the other workers when one dies, and '
    'let it in again when it is back.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'min_workers',
    1,
    'With --elastic: the fewest workers that train.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'num_virtual_devices',
    0,
    'Split the GPU, or the CPU where there is no GPU, into so many logical '
    'devices and use them; 0 uses the devices as they are.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'all_reduce',
    'ring',
    ALL_REDUCES,
    'How gradients are summed, with ring_mirrored and mirrored; builtin is '
    "TensorFlow's own, with mirrored only.",
    flag_values=flag_values,
  )


def _define_data(flag_values) -> None:
  flags.DEFINE_enum(
    'dataset',
    'mnist',
    tuple(_EPOCHS),
    'MNIST, the handwritten digits of scikit-learn, or made-up images.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'data_path',
    None,
    'MNIST as an .npz file, or a directory of IDX files or TFRecord shards; '
    'without it, from the Keras cache or the network.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'global_batch_size',
    None,
    'Examples of one step over all replicas; default by data set.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'epochs',
    0,
    'Epochs of the whole run, resumed ones included; 0 is the default of the '
    'data set.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'steps_per_epoch',
    None,
    'Steps of an epoch, more or fewer than a pass over the data takes: the next '
    'epoch goes on where one ended. Default: one pass.',
    lower_bound=1,
    flag_values=flag_values,
  )


def _define_training(flag_values) -> None:
  flags.DEFINE_enum(
    'model',
    'cnn',
    ('cnn', 'mlp'),
    'A small convolutional network, or 784-16-16-10.',
    flag_values=flag_values,
  )
  flags.DEFINE_float(
    'dropout',
    0.0,
    'Share of the last hidden layer that is dropped in training.',
    lower_bound=0.0,
    upper_bound=0.99,
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'optimizer',
    'sgd',
    ('sgd', 'adam'),
    'SGD with momentum 0.9, or Adam.',
    flag_values=flag_values,
  )
  flags.DEFINE_float(
    'learning_rate',
    None,
    'Learning rate; default by optimizer.',
    lower_bound=1e-12,
    flag_values=flag_values,
  )
  flags.DEFINE_bool(
    'scale_learning_rate',
    False,
    'Multiply the learning rate by the number of replicas (Goyal et al. 2017), '
    'where the global batch grew with them.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'warmup_steps',
    0,
    'Steps over which the learning rate rises linearly to its value.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'mixed_precision',
    'none',
    PRECISIONS,
    "Keras' policy for the dtypes of layers.",
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'seed',
    0,
    'Seed of the initial weights and of the order of examples.',
    lower_bound=0,
    upper_bound=2**31 - 1,
    flag_values=flag_values,
  )


def _define_output(flag_values) -> None:
  flags.DEFINE_string(
    'checkpoint_dir',
    None,
    'Save each epoch here, and on SIGTERM the last step; go on from there.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'log_dir',
    None,
    'Write logs for TensorBoard, what steps take and reports of the watchdog '
    'here.',
    # absl.logging has a flag of this name, for log files that we do not write.
    allow_override=True,
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'report_json',
    None,
    'Write the report of the run to this file.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'save_weights',
    None,
    'Write the final weights to this .npz file; see examples.compare_weights. '
    'With {rank} in its name, every worker writes one.',
    flag_values=flag_values,
  )
  flags.DEFINE_float(
    'min_accuracy',
    None,
    'Exit with code 2 if the final test accuracy is below.',
    lower_bound=0.0,
    upper_bound=1.0,
    flag_values=flag_values,
  )
  flags.DEFINE_bool(
    'verbose',
    True,
    'Show progress; the summary at the end is always shown.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'log_every_steps',
    50,
    'Steps between two lines of progress of a custom loop.',
    lower_bound=1,
    flag_values=flag_values,
  )


def _define_monitoring(flag_values) -> None:
  flags.DEFINE_string(
    'metrics_jsonl',
    None,
    'Write a line of JSON a step to this file, instead of to --log_dir: its '
    'time, examples a second, shares of communication and input, bytes sent, '
    "memory. Each worker's rank is added to its name.",
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'timeline',
    None,
    'Write what happened when to this file, for Perfetto or chrome://tracing; '
    "each worker's rank is added to its name. Put them together with "
    'python -m tf_strategies.monitoring.merge.',
    flag_values=flag_values,
  )
  flags.DEFINE_list(
    'profile_steps',
    None,
    "The first and the last step, from 1, of which TensorFlow's profiler "
    'writes a profile to --log_dir.',
    flag_values=flag_values,
  )
  flags.DEFINE_float(
    'watchdog_seconds',
    None,
    'Say which rank waits for what, with the stacks of all threads, when a '
    'step takes longer; 0 never does. Default: 120 with one of the flags above.',
    lower_bound=0.0,
    flag_values=flag_values,
  )
