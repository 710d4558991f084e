"""Workers that are linked by TensorFlow's collective runtime (RING or NCCL)."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.cross_device import statistics
from tf_strategies.strategies import communicator
from tf_strategies.strategies.multi_worker import buckets as buckets_lib

_ALONE_BYTES = 1 << 20
_EXCHANGE_SECONDS = 600.0


class RuntimeCommunicator(communicator.Communicator):
  """Every device of every worker takes part in TensorFlow's collectives.

  Args:
    rank: of this worker.
    world_size: number of workers.
    devices: full names of this worker's devices.
    collective_key_base: where group keys start.
    communication_hint: 'ring', 'nccl' or 'auto'.
    max_subdivs_per_device: into how many parts a tensor may be cut so that they
      travel at once; -1 for none, 0 for TensorFlow's choice.
    timeout_seconds: of each collective; 0 for none.
    bucket_bytes: the most that a bucket of small tensors holds.
  """

  def __init__(
    self,
    rank: int,
    world_size: int,
    devices: Sequence[str],
    collective_key_base: int,
    communication_hint: str,
    max_subdivs_per_device: int,
    timeout_seconds: float,
    bucket_bytes: int,
  ):
    self._rank = rank
    self._world_size = world_size
    self._devices = tuple(devices)
    self._bucket_bytes = bucket_bytes
    self._hint = communication_hint
    # The coordination service knows no strategies: each has names of its own.
    self._prefix = f'tf_strategies/{collective_key_base}'
    launch = _tf_internal.CollectiveLaunchers(
      collective_key_base, communication_hint, timeout_seconds
    )
    self._max_subdivs = max_subdivs_per_device
    self._timeout_seconds = timeout_seconds
    total = world_size * len(devices)
    self._launchers = launch.of(self._devices, total)
    # One tensor a worker: sizes, flags, counts.
    self._host = _tf_internal.host_of(devices[0])
    self._host_launcher = launch.of([self._host], world_size)[0]
    self._statistics: dict[str, statistics.CallStatistics] = {}
    self._agreements = itertools.count()

  @property
  def rank(self) -> int:
    """See base class."""
    return self._rank

  @property
  def world_size(self) -> int:
    """See base class."""
    return self._world_size

  def all_reduce(self, columns, name):
    """See base class."""
    if tf.executing_eagerly():
      # Eager ops would run one after the other, and the first would wait for
      # the second forever.
      return tf.function(lambda c: self._all_reduce(c, 'all_reduce'))(
        [list(column) for column in columns]
      )
    return self._all_reduce(columns, 'all_reduce')

  def _all_reduce(self, columns, kind):
    packed, sums = [], []
    for device, column in zip(self._devices, columns, strict=True):
      with tf.device(device):
        packed.append(
          buckets_lib.pack(
            column,
            [t.dtype.name for t in column],
            self._bucket_bytes,
            _ALONE_BYTES,
          )
        )
    for launcher, device, pack in zip(
      self._launchers, self._devices, packed, strict=True
    ):
      with tf.device(device):
        buckets = [self._reduce(launcher, b, 'Add') for b in pack.buckets]
        sums.append(pack.unpack(buckets))
    self._count(kind)
    return sums

  def all_reduce_replica(self, tensors, replica_id, options):
    """See base class."""
    del options
    if replica_id == 0:
      self._count('all_reduce_in_control_flow')
    launcher = self._launchers[replica_id]
    with tf.device(self._devices[replica_id]):
      return [self._reduce(launcher, t, 'Add') for t in tensors]

  def combine(self, tensor, op, name, is_report=False):
    """See base class; fails in any case where a worker has died."""
    del name, is_report
    merge = {'sum': 'Add', 'min': 'Min', 'max': 'Max'}[op]
    self._count(f'combine_{op}')
    with tf.device(self._host):
      return self._reduce(self._host_launcher, tensor, merge)

  def all_gather(self, tensor, name):
    """See base class; pads to the longest, which is what travels."""
    with tf.device(self._host):
      mine = tf.shape(tensor)[0]
      lengths = self.combine(
        tf.one_hot(self._rank, self._world_size, mine, 0, dtype=tf.int32),
        'sum',
        f'{name}/lengths',
      )
      longest = tf.reduce_max(lengths)
      padding = [[0, longest - mine]] + [[0, 0]] * (tensor.shape.rank - 1)
      # Each worker's rows in a place of their own: the sum is the gathering.
      padded = tf.pad(tensor, padding)[None]
      before = [[self._rank, self._world_size - 1 - self._rank]]
      placed = tf.pad(padded, before + [[0, 0]] * tensor.shape.rank)
      everyone = self.combine(placed, 'sum', name)
      mask = tf.sequence_mask(lengths, longest)
      gathered = tf.boolean_mask(everyone, mask)
      gathered.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
      return gathered

  def broadcast(self, tensor, root, name):
    """See base class; the others add zeros."""
    with tf.device(self._host):
      if self._rank != root:
        tensor = tf.zeros_like(tensor)
      return self.combine(tensor, 'sum', name)

  def exchange(self, tag, payload):
    """See base class; through TensorFlow's coordination service."""
    if self._world_size == 1:
      return [payload]
    text = base64.b64encode(payload).decode()
    return [
      base64.b64decode(answer)
      for answer in _tf_internal.exchange_config_values(
        f'{self._prefix}/{tag}',
        text,
        self._rank,
        self._world_size,
        _EXCHANGE_SECONDS,
      )
    ]

  def agree(self, value: Any, what: str) -> Any:
    """See base class."""
    tag = f'agree/{next(self._agreements)}'
    answers = self.exchange(tag, json.dumps(value, sort_keys=True).encode())
    different = [r for r, a in enumerate(answers) if a != answers[0]]
    if different:
      error = errors.CollectiveMismatchError(
        f'the workers disagree on {what}: rank 0 has {answers[0].decode()}, '
        f'rank {different[0]} has {answers[different[0]].decode()}. Start all '
        'workers with the same program and options.'
      )
      error.ranks = tuple(different)
      raise error
    return value

  def report(self):
    """See base class; calls are counted as graphs run."""
    calls = {kind: s.calls for kind, s in self._statistics.items()}
    return {
      'link': f'tensorflow/{self._hint}',
      'rank': self._rank,
      'world_size': self._world_size,
      'calls': calls,
    }

  def close(self):
    """See base class; TensorFlow's runtime ends with the process."""

  def _count(self, kind):
    if kind not in self._statistics:
      self._statistics[kind] = statistics.CallStatistics()
    self._statistics[kind].record([self._host], [0])

  def _reduce(self, launcher, tensor, merge_op):
    dtype = tensor.dtype
    # What the runtime has no kernel for travels as a wider integer.
    if not dtype.is_floating and dtype not in (tf.int32, tf.int64):
      tensor = tf.cast(tensor, tf.int64)
    reduced = _tf_internal.collective_all_reduce(
      launcher,
      tensor,
      merge_op,
      self._hint,
      self._timeout_seconds,
      self._max_subdivs,
    )
    return tf.cast(reduced, dtype) if reduced.dtype != dtype else reduced
