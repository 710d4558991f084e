"""The jobs that `strategies` runs: the rows of its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tf_strategies import errors


@dataclasses.dataclass(frozen=True)
class Job:
  """One way to train.

  Attributes:
    name: name in flags, tables and JSON.
    strategy: name of the strategy in `tfs.create_strategy`.
    num_workers: number of worker tasks. 0 is a single process without a launcher.
    num_ps: number of parameter servers. A job with servers also has a chief.
    options: further options of the example.
  """

  name: str
  strategy: str
  num_workers: int = 0
  num_ps: int = 0
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def launcher_flags(self) -> tuple[str, ...]:
    """Returns the flags of `tf_strategies.launch`, or none for a single process.

    Example:

      >>> costs('parameter_server_async').launcher_flags
      ('--num_workers=2', '--num_ps=2', '--chief')
    """
    if not self.num_workers:
      return ()
    flags = (f'--num_workers={self.num_workers}',)
    if self.num_ps:
      flags += (f'--num_ps={self.num_ps}', '--chief')
    return flags

  def describe(self, num_devices: int) -> str:
    """Describes the tasks or devices.

    Example:

      >>> costs('parameter_server_async').describe(4)
      '2 workers, 2 servers'
      >>> COSTS[0].describe(4), COSTS[1].describe(4)
      ('1 device', '4 devices')

    Args:
      num_devices: number of devices of a single process.
    """
    if not self.num_workers:
      return _plural(
        1 if self.strategy == 'one_device' else num_devices, 'device'
      )
    words = _plural(self.num_workers, 'worker')
    return (
      f'{words}, {_plural(self.num_ps, "server")}' if self.num_ps else words
    )


COSTS = (
  Job('one_device', 'one_device'),
  # TensorFlow's strategy with its own all-reduce.
  Job('mirrored', 'mirrored', options={'all_reduce': 'builtin'}),
  Job('ring_mirrored', 'ring_mirrored'),
  Job('central_storage', 'central_storage'),
  Job('multi_worker_ring', 'multi_worker_ring', 2),
  Job('multi_worker_collective', 'multi_worker_collective', 2),
  Job('parameter_server_async', 'parameter_server', 2, 2, {'mode': 'async'}),
  Job('parameter_server_sync', 'parameter_server', 2, 2, {'mode': 'sync'}),
)


def costs(name: str) -> Job:
  """Returns the job of a row of the table.

  Raises:
    UnsupportedOptionError: if there is no such row.
  """
  for job in COSTS:
    if job.name == name:
      return job
  raise errors.UnsupportedOptionError(
    f'strategies={name!r}',
    f'one of {", ".join(job.name for job in COSTS)}',
    'check the spelling',
  )


def _plural(count: int, noun: str) -> str:
  return f'{count} {noun}' + ('' if count == 1 else 's')
