"""The jobs that `strategies` runs: the rows of its two tables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from tf_strategies import errors

_RING = re.compile(r'ring_([1-9]\d*)')
_SERVERS = re.compile(r'(async|sync)_([1-9]\d*)w([1-9]\d*)ps')


@dataclasses.dataclass(frozen=True)
class Job:
  """One way to train.

  Attributes:
    name: for flags, tables and JSON.
    strategy: as `tfs.create_strategy` has it.
    num_workers: worker tasks; 0 is a single process without a launcher.
    num_ps: parameter servers, besides which there is a chief.
    options: of the example, besides the strategy.
  """

  name: str
  strategy: str
  num_workers: int = 0
  num_ps: int = 0
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def num_tasks(self) -> int:
    """Processes that work: workers, parameter servers and their chief."""
    return max(1, self.num_workers) + self.num_ps + bool(self.num_ps)

  @property
  def launcher_flags(self) -> tuple[str, ...]:
    """Flags of `tf_strategies.launch`; none for a single process.

    Example:

      >>> configuration('async_2w1ps').launcher_flags
      ('--num_workers=2', '--num_ps=1', '--chief')
    """
    if not self.num_workers:
      return ()
    flags = (f'--num_workers={self.num_workers}',)
    if self.num_ps:
      flags += (f'--num_ps={self.num_ps}', '--chief')
    return flags

  def describe(self, num_devices: int) -> str:
    """Says what runs.

    Example:

      >>> configuration('async_2w1ps').describe(4)
      '2 workers, 1 server'
      >>> COSTS[0].describe(4), COSTS[1].describe(4)
      ('1 device', '4 devices')

    Args:
      num_devices: of a single process.
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
  # TensorFlow's strategy with TensorFlow's all-reduce.
  Job('mirrored', 'mirrored', options={'all_reduce': 'builtin'}),
  Job('ring_mirrored', 'ring_mirrored'),
  Job('central_storage', 'central_storage'),
  Job('multi_worker_ring', 'multi_worker_ring', 2),
  Job('multi_worker_collective', 'multi_worker_collective', 2),
  Job('parameter_server_async', 'parameter_server', 2, 2, {'mode': 'async'}),
  Job('parameter_server_sync', 'parameter_server', 2, 2, {'mode': 'sync'}),
)
CONFIGURATIONS = (
  'ring_1',
  'ring_2',
  'ring_4',
  'async_2w1ps',
  'async_2w2ps',
  'async_4w2ps',
)


def costs(name: str) -> Job:
  """Returns the job of a row of the cost table.

  Raises:
    UnsupportedOptionError: there is no such row.
  """
  for job in COSTS:
    if job.name == name:
      return job
  raise errors.UnsupportedOptionError(
    f'strategies={name!r}',
    f'one of {", ".join(job.name for job in COSTS)}',
    'check the spelling',
  )


def configuration(name: str) -> Job:
  """Returns the job of a row of the scaling table.

  Example:

    >>> configuration('ring_4').num_workers
    4
    >>> configuration('sync_4w2ps').options
    {'mode': 'sync'}

  Raises:
    UnsupportedOptionError: the name describes no job.
  """
  found = _RING.fullmatch(name)
  if found:
    return Job(name, 'multi_worker_ring', int(found[1]))
  found = _SERVERS.fullmatch(name)
  if found:
    mode, workers, servers = found.groups()
    return Job(
      name, 'parameter_server', int(workers), int(servers), {'mode': mode}
    )
  raise errors.UnsupportedOptionError(
    f'configurations={name!r}',
    'ring_<workers>, async_<workers>w<servers>ps or sync_<workers>w<servers>ps',
    'write for instance ring_4 or async_4w2ps',
  )


def _plural(count: int, noun: str) -> str:
  return f'{count} {noun}' + ('' if count == 1 else 's')
