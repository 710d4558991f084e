"""The flags that training with parameter servers has besides.

Example:

  >>> from absl import flags
  >>> flag_values = flags.FlagValues()
  >>> define(flag_values)
  >>> _ = flag_values(['program', '--mode=bounded', '--max_staleness=2'])
  >>> options = parse(flag_values)
  >>> options.strategy_options()['mode'], options.loop
  ('bounded', 'fit')
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from absl import flags

import tf_strategies as tfs
from examples import common_flags

_MODES = ('async', 'sync', 'bounded')
_LOOPS = ('fit', 'custom')

# Cutting costs a message a part: of the models here, the kernel of the hidden
# layer alone (256 KiB) is worth it.
_MIN_PART_BYTES = 64 << 10

# Given to the strategy as they are.
_STRATEGY_OPTIONS = (
  'mode',
  'backup_workers',
  'max_staleness',
  'local_steps',
  'checkpoint_dir',
  'checkpoint_steps',
)


@dataclasses.dataclass(frozen=True)
class ParameterServerOptions(common_flags.TrainingOptions):
  """What a run trains and how; one field a flag of the same name.

  Raises:
    UnsupportedOptionError: options that contradict each other.
  """

  strategy: str = 'parameter_server'
  loop: str = 'fit'
  mode: str = 'async'
  backup_workers: int = 0
  max_staleness: int | None = None
  local_steps: int = 1
  checkpoint_steps: int | None = None
  variable_partitions: int = 0
  worker_input: bool = False
  steps_per_execution: int = 1

  def __post_init__(self):
    super().__post_init__()
    if self.loop == 'custom' and self.steps_per_execution > 1:
      raise tfs.errors.UnsupportedOptionError(
        f"steps_per_execution={self.steps_per_execution} with loop='custom'",
        "steps_per_execution with loop='fit', whose steps Keras groups",
        "write loop='fit', or leave steps_per_execution out",
      )

  def strategy_options(self) -> dict[str, object]:
    """Arguments of `tfs.ParameterServerStrategy`."""
    arguments = {name: getattr(self, name) for name in _STRATEGY_OPTIONS}
    if self.variable_partitions:
      partitioners = tf.distribute.experimental.partitioners
      arguments['variable_partitioner'] = partitioners.MinSizePartitioner(
        _MIN_PART_BYTES, self.variable_partitions
      )
    return arguments


def parse(
  flag_values: flags.FlagValues = flags.FLAGS,
) -> ParameterServerOptions:
  """Returns the options that the parsed flags describe.

  Raises:
    UnsupportedOptionError: as `ParameterServerOptions`.
  """
  return common_flags.parse(flag_values, ParameterServerOptions)


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the flags of data, training, output and parameter servers."""
  common_flags.define_run(flag_values)
  _define_mode(flag_values)
  _define_steps(flag_values)


def _define_mode(flag_values) -> None:
  flags.DEFINE_enum(
    'mode',
    'async',
    _MODES,
    'When the gradients of a worker reach the variables: at once; with those '
    'of all others; or at once, but no worker gets far ahead.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'backup_workers',
    0,
    'With --mode=sync: so many workers may come too late to a step.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'max_staleness',
    None,
    'With --mode=bounded: steps that a worker may be ahead of the slowest; '
    'default 1.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'local_steps',
    1,
    'With --mode=async: steps on a copy of the variables before a worker sends '
    'what changed.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'checkpoint_steps',
    None,
    'With --checkpoint_dir: steps between two checkpoints.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'variable_partitions',
    0,
    'Cut large variables into so many parts at most; 0 cuts none.',
    lower_bound=0,
    flag_values=flag_values,
  )


def _define_steps(flag_values) -> None:
  flags.DEFINE_enum(
    'loop',
    'fit',
    _LOOPS,
    "Keras' fit, or a loop of one's own.",
    flag_values=flag_values,
  )
  flags.DEFINE_bool(
    'worker_input',
    False,
    'Let workers read the training data themselves; without it the chief hands '
    'out batches.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'steps_per_execution',
    1,
    'With --loop=fit: steps of one call of a worker.',
    lower_bound=1,
    flag_values=flag_values,
  )
