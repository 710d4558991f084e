"""Defines how workers communicate: one frozen object for each kind of link."""

from __future__ import annotations

import dataclasses

from tf_strategies import option_checks, process_group
from tf_strategies.collectives import algorithms

_LINKS = ('auto', 'tcp', 'mpi')
_COMMUNICATIONS = ('auto', 'ring', 'nccl')
# The dtypes in which gradients can travel, by their names.
_COMPRESSIONS = ('none', 'bfloat16', 'float16')


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class RingOptions:
  """Options of the communication in a `MultiWorkerRingStrategy`.

  Attributes:
    link: 'tcp', or 'mpi' for a job that `mpiexec` started. 'auto' means 'mpi' in such
      a job, unless TF_CONFIG or a scheduler describes the job.
    bucket_bytes: largest size of a bucket of gradients. Buckets travel while the
      backward pass computes the next one.
    all_reduce: algorithm between workers: a name for `tfs.ScheduledAllReduce`, or
      'hierarchical(4)' with the number of workers on a host. 'auto' chooses it by
      the size of a bucket and by the hosts.
    compression: format in which an optimizer's float gradients travel: 'none',
      or 'bfloat16' or 'float16' with half of the bytes (8 or 11 bits of
      precision). All other values are exact.
    group: rendezvous, secret and deadlines; None takes the secret from the
      environment.

  Raises:
    UnsupportedOptionError: if the link, algorithm or compression is unknown, or the
      bytes are not positive.
  """

  link: str = 'auto'
  bucket_bytes: int = 8 << 20
  all_reduce: str = 'auto'
  compression: str = 'none'
  group: process_group.GroupOptions | None = None

  def __post_init__(self):
    option_checks.check_choice('link', self.link, _LINKS)
    option_checks.check_int('bucket_bytes', self.bucket_bytes, 1)
    algorithms.check(self.all_reduce, 'auto', option='all_reduce')
    option_checks.check_choice(
      'compression',
      self.compression,
      _COMPRESSIONS,
      "write 'bfloat16' or 'float16', or 'none' to send gradients as they are",
    )
    option_checks.check_type(
      'group',
      self.group,
      (process_group.GroupOptions, type(None)),
      'tfs.process_group.GroupOptions, or None',
      'write group=tfs.process_group.GroupOptions(...)',
    )


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class CollectiveOptions:
  """Options of the communication in a `MultiWorkerCollectiveStrategy`.

  Attributes:
    communication: 'auto' (NCCL between physical GPUs, otherwise the ring), 'ring' or
      'nccl'.
    max_subdivs_per_device: largest number of parts of a tensor that travel at the
      same time; -1 to cut none, 0 for TensorFlow's choice.
    bucket_bytes: largest size of a bucket of small gradients.
    start_timeout_seconds: how long to wait for the other workers.
    timeout_seconds: how long one collective may take; 0 for no limit.

  Raises:
    UnsupportedOptionError: if the communication is unknown, or a number is out of
      range.
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
