"""Links workers by TensorFlow's collective runtime (RING or NCCL)."""

import collections
import contextlib
import itertools
import json
import time
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import _tf_internal, errors, option_checks
from tf_strategies.cross_device import packing, statistics
from tf_strategies.strategies import communicator
from tf_strategies.strategies.multi_worker import options as options_lib

# The limit if the options set none.
_EXCHANGE_SECONDS = 600.0


class RuntimeCommunicator(communicator.Communicator):
  """Every device of every worker takes part in TensorFlow's collectives.

  `devices` are this worker's devices. Group keys start at
  `collective_key_base`.
  """

  # Of TensorFlow's collectives. Each communicator has its own, which are equal on all
  # workers, although some may have made other strategies too.
  _key_bases = itertools.count(500_000_000, 1_000)

  # Its collectives take inputs that TensorFlow cannot lift out of a step.
  initializes_eagerly = True

  def __init__(
    self,
    rank: int,
    world_size: int,
    devices: Sequence[str],
    options: options_lib.CollectiveOptions,
  ):
    super().__init__(devices)
    self.rank = rank
    self.world_size = world_size
    self._options = options
    # The coordination service is common to all strategies, so each has its own
    # names.
    key_base = next(self._key_bases)
    self._prefix = f'tf_strategies/{key_base}'
    # For one tensor per worker: sizes, flags, counts.
    self._host = _tf_internal.host_of(devices[0])
    self._launchers, [self._host_launcher] = _tf_internal.collective_launchers(
      [([*devices], world_size * len(devices)), ([self._host], world_size)],
      key_base,
      options.communication,
      options.timeout_seconds,
    )
    self._statistics = collections.defaultdict(statistics.CallStatistics)
    # How often each tag was used: the service keeps a key for ever.
    self._uses: collections.Counter[str] = collections.Counter()

  def all_reduce(self, columns, name, gradients=()):
    """See base class."""
    del gradients
    if tf.executing_eagerly():
      # Eager ops would run one by one, and the first would wait for the second
      # forever.
      return tf.function(lambda c: self.all_reduce(c, name))(
        [list(column) for column in columns]
      )
    sums = []
    for launcher, device, column in zip(
      self._launchers, self._devices, columns, strict=True
    ):
      with tf.device(device):
        packed = packing.pack(column, self._options.bucket_bytes)
        buckets = [self._reduce(launcher, b) for b in packed.buckets]
        sums.append(packed.unpack(buckets))
    self._count('all_reduce')
    return sums

  def sum(self, tensor, name):
    """See base class."""
    del name
    self._count('sum')
    return self._sum(tensor)

  def _sum(self, tensor):
    """Adds up one host tensor of each worker without counting the call."""
    with tf.device(self._host):
      if tensor.shape.num_elements():
        return self._reduce(self._host_launcher, tensor)
      # TensorFlow's collectives fail on tensors without elements. The tensor
      # may have none at run time, so one element is added.
      longer = tf.pad(tf.reshape(tensor, [-1]), [[0, 1]])
      reduced = self._reduce(self._host_launcher, longer)
      result = tf.reshape(reduced[:-1], tf.shape(tensor))
      result.set_shape(tensor.shape)
      return result

  def all_gather(self, tensor, name):
    """See base class."""
    del name
    self._count('all_gather')
    with tf.device(self._host):
      mine = tf.shape(tensor)[0]
      lengths = self._sum(
        tf.one_hot(self.rank, self.world_size, mine, 0, dtype=tf.int32)
      )
      before = tf.reduce_sum(lengths[: self.rank])
      after = tf.reduce_sum(lengths) - before - mine
      # Each worker's rows have their own place, so that the sum gathers them.
      padding = [[before, after]] + [[0, 0]] * (tensor.shape.rank - 1)
      gathered = self._sum(tf.pad(tensor, padding))
      gathered.set_shape([None, *tensor.shape[1:]])
      return gathered

  def from_chief(self, tensor, name):
    """See base class. The other workers add zeros."""
    del name
    self._count('broadcast')
    with tf.device(self._host):
      if self.rank:
        tensor = tf.zeros_like(tensor)
      return self._sum(tensor)

  def exchange(self, tag, value):
    """See base class. Uses TensorFlow's coordination service."""
    text = json.dumps(value, default=option_checks.plain)
    if self.world_size == 1:
      return [json.loads(text)]
    seconds = self._options.timeout_seconds or _EXCHANGE_SECONDS
    ends_at = time.monotonic() + seconds
    self._uses[tag] += 1
    name, rank = f'{self._prefix}/{tag}/{self._uses[tag]}', self.rank
    answers = []
    try:
      _tf_internal.publish_config_value(f'{name}/{rank}', text)
      for rank in range(self.world_size):
        answer = _tf_internal.config_value(
          f'{name}/{rank}', ends_at - time.monotonic()
        )
        answers.append(json.loads(answer))
      # The service ends with rank 0, which may end after this call.
      if self.rank:
        with contextlib.suppress(tf.errors.OpError):
          _tf_internal.publish_config_value(f'{name}/read/{self.rank}', '')
      else:
        for rank in range(1, self.world_size):
          _tf_internal.config_value(
            f'{name}/read/{rank}', ends_at - time.monotonic()
          )
    except tf.errors.OpError as e:
      raise _exchange_error(e, tag, rank, seconds) from e
    return answers

  def report(self):
    """See base class. Calls are counted when graphs run."""
    return {
      'link': f'tensorflow/{self._options.communication}',
      'rank': self.rank,
      'world_size': self.world_size,
      'calls': {kind: s.calls for kind, s in self._statistics.items()},
    }

  def close(self):
    """See base class. TensorFlow's runtime ends with the process."""

  def _count(self, kind):
    self._statistics[kind].record([self._host])

  def _reduce(self, launcher, tensor):
    communicator.check_not_compiled('sum')
    dtype = tensor.dtype
    # A dtype without a kernel travels as a wider integer.
    if not dtype.is_floating and dtype not in (tf.int32, tf.int64):
      tensor = tf.cast(tensor, tf.int64)
    reduced = _tf_internal.collective_all_reduce(
      launcher,
      tensor,
      self._options.communication,
      self._options.timeout_seconds,
      self._options.max_subdivs_per_device,
    )
    return tf.cast(reduced, dtype)


def _exchange_error(
  error: tf.errors.OpError, tag: str, rank: int, seconds: float
) -> errors.Error:
  """Returns the typed error for an error of the coordination service."""
  if isinstance(error, tf.errors.DeadlineExceededError):
    typed = errors.CollectiveTimeoutError(
      f'exchange {tag!r}: worker {rank} did not come within {seconds:g} s. It '
      'died, or its program does something else. Fix: look at its log, or '
      'raise CollectiveOptions.timeout_seconds.'
    )
    typed.tensor = tag
  else:
    typed = errors.WorkerUnavailableError(
      f'exchange {tag!r} failed while this worker waited for worker {rank}: '
      f"TensorFlow's coordination service says: {error.message}. Fix: look at "
      'the logs of the other workers, then restart.'
    )
  typed.rank = rank
  return typed
