"""The options of `ParameterServerStrategy`, checked when they are given."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from tf_strategies import option_checks

MODES = ('async', 'sync', 'bounded')
_CHECKPOINT_STEPS = 1000
_TIMEOUTS = (
  'start_timeout',
  'recovery_timeout',
  'step_timeout',
  'keepalive_timeout',
)


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class ParameterServerOptions:
  """How a parameter server job trains; see `ParameterServerStrategy`."""

  mode: str = 'async'
  variable_partitioner: Callable | None = None
  backup_workers: int = 0
  max_staleness: int = 1
  checkpoint_dir: str | None = None
  checkpoint_steps: int = _CHECKPOINT_STEPS
  start_timeout: float = 300.0
  recovery_timeout: float = 300.0
  step_timeout: float = 600.0
  keepalive_timeout: float = 60.0

  def __post_init__(self):
    option_checks.check_choice('mode', self.mode, MODES)
    option_checks.check(
      self.variable_partitioner is None or callable(self.variable_partitioner),
      f'variable_partitioner={self.variable_partitioner!r}',
      'a function of shape and dtype',
      'use one of tf.distribute.experimental.partitioners',
    )
    for name, mode, default in (
      ('backup_workers', 'sync', 0),
      ('max_staleness', 'bounded', 1),
    ):
      value = getattr(self, name)
      option_checks.check_int(name, value, 0)
      option_checks.check(
        value == default or self.mode == mode,
        f'{name}={value!r} with mode={self.mode!r}',
        f'{name} with mode={mode!r}',
        f'write mode={mode!r}, or leave out {name}',
      )
    self._check_checkpoints()
    for name in _TIMEOUTS:
      option_checks.check_seconds(name, getattr(self, name))

  def check_workers(self, num_workers: int) -> None:
    """Refuses options that do not go with so many workers."""
    option_checks.check(
      self.backup_workers < num_workers,
      f'backup_workers={self.backup_workers} with {num_workers} workers',
      f'0 to {num_workers - 1} backup workers',
      'use fewer backup workers, or more workers: at least one gradient of '
      'a step must count',
    )

  def _check_checkpoints(self) -> None:
    option_checks.check_int('checkpoint_steps', self.checkpoint_steps, 1)
    if self.checkpoint_dir is None:
      option_checks.check(
        self.checkpoint_steps == _CHECKPOINT_STEPS,
        f'checkpoint_steps={self.checkpoint_steps!r} alone',
        'checkpoint_dir with checkpoint_steps',
        "pass for instance checkpoint_dir='/data/run'",
      )
      return
    option_checks.check_local_path(
      'checkpoint_dir',
      self.checkpoint_dir,
      "write checkpoint_dir='...', or leave it out",
    )
    object.__setattr__(self, 'checkpoint_dir', os.fspath(self.checkpoint_dir))
