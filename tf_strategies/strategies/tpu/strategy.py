"""`TPURingStrategy`: TPU training with an all-reduce of one's choice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import tensorflow as tf

from tf_strategies import errors, option_checks
from tf_strategies.collectives import algorithms
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.keras import scope_checks
from tf_strategies.strategies.tpu import extended, permute, system

AllReduce = str | Callable[[int], schedule_lib.Schedule]

_BUILTIN = 'builtin'


@option_checks.has_options
class TPURingStrategy(tf.distribute.TPUStrategy):
  """Synchronous training on TPUs whose all-reduce is a `Schedule`.

  Checked in the graph and in simulation; never run on a TPU.

  Beside `tf.distribute.TPUStrategy`:

  * Sums and means over replicas inside `run` are made of CollectivePermute ops
    by the schedule that `all_reduce` names. The gradients of a step are packed
    into one buffer a dtype: a ring over N replicas takes 2 (N - 1) permutes a
    dtype, however many variables there are.
  * `tfs.keras.DistributedOptimizer` works, with batches of static shape;
    others raise an error, as does an option that is wrong without it.
  * Moving statistics of BatchNormalization are one mean value everywhere. Each
    costs an all-reduce of its own in every step.
  * All replicas agree whether gradients are finite.

  As before, `tf.IndexedSlices` become dense and are summed by CrossReplicaSum
  (where `DistributedOptimizer` clips them it raises an error); replicas draw the
  same random numbers; reductions outside of `run` are made on the host; without
  the wrapper a replica with fewer rows counts as much as the others, so batch
  with `drop_remainder=True`.

  Whether a ring of CollectivePermute is faster than CrossReplicaSum on a given
  TPU has not been measured. Use 'builtin' where it is not.

  Example:

    >>> strategy = TPURingStrategy(
    ...   tf.distribute.cluster_resolver.TPUClusterResolver('local')
    ... )  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tf_strategies.errors.UnsupportedOptionError: a resolver of a TPU without ...

  Args:
    resolver: of a TPU that is connected and initialised; None for the one that
      the environment names.
    all_reduce: a name in `tfs.collectives.ALGORITHMS`; a function from a number
      of replicas to a schedule; or 'builtin' for CrossReplicaSum.
    device_assignment: a `tf.tpu.experimental.DeviceAssignment` with one core a
      replica; None for TensorFlow's order.
    query_timeout_seconds: how long the resolver may take to answer.

  Raises:
    UnsupportedOptionError: no TPU, no resolver, a TPU that was not initialised,
      an unknown `all_reduce`, or more than one core a replica.
    ClusterConfigError: a resolver that fails or does not answer.
    ScheduleError: a function that returns something else than an all-reduce
      over the replicas.
  """

  def __init__(
    self,
    resolver: tf.distribute.cluster_resolver.TPUClusterResolver | None = None,
    all_reduce: AllReduce = 'ring',
    device_assignment: tf.tpu.experimental.DeviceAssignment | None = None,
    query_timeout_seconds: float = 60.0,
  ):
    _check_all_reduce(all_reduce)
    system.check_device_assignment(device_assignment)
    resolver, metadata = system.find(resolver, query_timeout_seconds)
    implementation = extended.PermutingTPUExtended(
      self, resolver, metadata, device_assignment
    )
    # TPUStrategy's own __init__ would build its own extended.
    tf.distribute.Strategy.__init__(self, implementation)
    scope_checks.note_created(self)
    # As TPUStrategy does: one handle in place of one a replica.
    self._enable_packed_variable_in_eager_mode = True
    self._schedule = _build_schedule(all_reduce, self.num_replicas_in_sync)
    if self._schedule is not None:
      implementation.all_reduce = permute.PermutingAllReduce(self._schedule)

  def scope(self) -> contextlib.AbstractContextManager:
    """See base class."""
    scope_checks.note_entered(self)
    return super().scope()

  @property
  def schedule(self) -> schedule_lib.Schedule | None:
    """What an all-reduce executes; None for TensorFlow's own."""
    return self._schedule


def _check_all_reduce(all_reduce) -> None:
  known = (*algorithms.ALGORITHMS, _BUILTIN)
  is_known = isinstance(all_reduce, str) and all_reduce in known
  if not callable(all_reduce) and not is_known:
    raise errors.UnsupportedOptionError(
      f'all_reduce={all_reduce!r}',
      f'one of {sorted(known)}, or a function from world_size to a Schedule',
      "leave it out for 'ring'",
    )


def _build_schedule(all_reduce, num_replicas) -> schedule_lib.Schedule | None:
  """The schedule for so many replicas, proven to be an all-reduce."""
  if all_reduce == _BUILTIN:
    return None
  builder = all_reduce
  if isinstance(all_reduce, str):
    builder = algorithms.ALGORITHMS[all_reduce]
  schedule = builder(num_replicas)
  if not isinstance(schedule, schedule_lib.Schedule):
    raise errors.ScheduleError(
      f'all_reduce={all_reduce!r} returned {schedule!r} for {num_replicas} '
      'replicas. It must return a tfs.collectives.Schedule.'
    )
  if schedule.world_size != num_replicas:
    raise errors.ScheduleError(
      f'all_reduce={all_reduce!r} returned a schedule of '
      f'{schedule.world_size} ranks for {num_replicas} replicas. Build it for '
      'the world_size that it is called with.'
    )
  schedule.validate()
  if not schedule.adds_up_once():
    raise errors.ScheduleError(
      f'Expected a schedule that adds up each chunk on one replica, got '
      f'{schedule.name!r}, of which all replicas add up the same chunks. A TPU '
      "program adds in another order on each of them. Fix: all_reduce='ring'."
    )
  return schedule
