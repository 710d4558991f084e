"""Defines how workers communicate: one frozen object for each kind of link."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tf_strategies import option_checks, process_group
from tf_strategies.collectives import algorithms, codecs
from tf_strategies.process_group import options as group_options
from tf_strategies.strategies.mirrored import shards

_LINKS = ('auto', 'tcp', 'mpi')
_COMMUNICATIONS = ('auto', 'ring', 'nccl')


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class RingOptions:
  """How the workers of a `MultiWorkerRingStrategy` talk.

  Attributes:
    link: 'tcp', or 'mpi' for a job that `mpiexec` started; 'auto' is 'mpi' there,
      unless TF_CONFIG or a scheduler describes the job.
    bucket_bytes: the most that a bucket of gradients holds. Buckets travel while
      the backward pass computes the next one.
    all_reduce: the algorithm between workers, a name that
      `tfs.ScheduledAllReduce` knows, or 'hierarchical(4)' with the number of
      workers of a host; 'auto' picks it by the size of a bucket and by the hosts.
    compression: what float gradients that go to an optimizer travel as; all else is
      exact. 'none', or, with half of the bytes, 'bfloat16' or 'float16' (8 or 11
      bits of precision). 'int8' takes a quarter. Each worker adds what 'int8'
      leaves out to its next gradient, and checkpoints have it. A function of a
      variable that returns such a name chooses for each:
      `lambda v: 'int8' if len(v.shape) > 1 else 'none'`.
    reproducible: whether weights are the same to the bit for any number of workers
      and any algorithm: the global batch is cut into virtual shards, which workers
      share out, and sums do not depend on order. True means 8 shards; a number is
      that of shards, from the number of replicas to 128, and has to be the same in
      all runs that are to be equal. For the steps of models; see "The same bits"
      in docs/several_workers.md.
    group: rendezvous, secret and deadlines; None takes the secret from the
      environment.

  Raises:
    UnsupportedOptionError: an unknown link, algorithm or compression, no bytes,
      or `reproducible` with a compression.
  """

  link: str = 'auto'
  bucket_bytes: int = 8 << 20
  all_reduce: str = 'auto'
  compression: str | Callable[[Any], str] = 'none'
  reproducible: bool | int = False
  group: process_group.GroupOptions | None = None

  def __post_init__(self):
    option_checks.check_choice('link', self.link, _LINKS)
    option_checks.check_int('bucket_bytes', self.bucket_bytes, 1)
    algorithms.check(self.all_reduce, 'auto', option='all_reduce')
    if not callable(self.compression):
      codecs.get(self.compression)
    option_checks.check(
      not shards.check(self.reproducible) or self.compression == 'none',
      f'compression={self.compression!r} with '
      f'reproducible={self.reproducible!r}',
      "compression='none': it rounds sums",
      'leave out one of them',
    )
    if self.group is not None:
      group_options.check_type('group', self.group)
    option_checks.keep_plain(self)


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class CollectiveOptions:
  """How the workers of a `MultiWorkerCollectiveStrategy` talk.

  Attributes:
    communication: 'auto' (NCCL between physical GPUs, else the ring), 'ring' or
      'nccl'.
    max_subdivs_per_device: into how many parts a tensor may be cut so that they
      travel at once; -1 for none, 0 for TensorFlow's choice.
    bucket_bytes: the most that a bucket of small gradients holds.
    start_timeout_seconds: how long to wait for the other workers.
    timeout_seconds: how long one collective may take; 0 for no limit.

  Raises:
    UnsupportedOptionError: an unknown communication, or a number out of range.
  """

  communication: str = 'auto'
  max_subdivs_per_device: int = 8
  bucket_bytes: int = 8 << 20
  start_timeout_seconds: float = 300.0
  timeout_seconds: float = 0.0

  def __post_init__(self):
    option_checks.check_choice(
      'communication', self.communication, _COMMUNICATIONS
    )
    option_checks.check_int(
      'max_subdivs_per_device', self.max_subdivs_per_device, -1
    )
    option_checks.check_int('bucket_bytes', self.bucket_bytes, 1)
    for name in ('start_timeout_seconds', 'timeout_seconds'):
      option_checks.check_seconds(name, getattr(self, name), or_zero=True)
    option_checks.keep_plain(self)
