"""How the workers of a strategy talk: one frozen object for each kind of link."""

from __future__ import annotations

import dataclasses

from tf_strategies import option_checks, process_group
from tf_strategies.collectives import algorithms, codecs
from tf_strategies.strategies.mirrored import shards

_LINKS = ('tcp', 'mpi')
_COMMUNICATIONS = ('auto', 'ring', 'nccl')


@dataclasses.dataclass(frozen=True)
class RingOptions:
  """How the workers of a `MultiWorkerRingStrategy` talk.

  Attributes:
    link: 'tcp', or 'mpi' for a job that `mpiexec` started.
    bucket_bytes: the most that a bucket of gradients holds. Buckets travel while
      the backward pass computes the next one.
    all_reduce: the algorithm between workers, a name in
      `tfs.collectives.ALGORITHMS`; 'auto' picks it by the size of a bucket.
    compression: what float gradients that go to an optimizer travel as, a name
      in `tfs.collectives.CODECS`; all else is exact. Sums are made in float32.
      'bfloat16' and 'float16' halve the bytes where the network is the limit,
      and cost precision (8 or 11 bits).
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

  link: str = 'tcp'
  bucket_bytes: int = 8 << 20
  all_reduce: str = 'auto'
  compression: str = 'none'
  reproducible: bool | int = False
  group: process_group.GroupOptions | None = None

  def __post_init__(self):
    option_checks.check_choice('link', self.link, _LINKS)
    option_checks.check_int('bucket_bytes', self.bucket_bytes, 1)
    algorithms.check(self.all_reduce, 'auto')
    codecs.get(self.compression)
    if shards.check(self.reproducible):
      option_checks.check_choice(
        'compression',
        self.compression,
        ('none',),
        'leave out compression, which rounds sums, or reproducible',
      )
    option_checks.check_type(
      'group',
      self.group,
      (process_group.GroupOptions, type(None)),
      'tfs.process_group.GroupOptions, or None',
      'write group=tfs.process_group.GroupOptions(...)',
    )


@dataclasses.dataclass(frozen=True)
class CollectiveOptions:
  """How the workers of a `MultiWorkerCollectiveStrategy` talk.

  Attributes:
    communication: 'auto' (NCCL between GPUs, else the ring), 'ring' or 'nccl'.
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
