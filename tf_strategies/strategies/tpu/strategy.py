"""`TPURingStrategy`: TPU training with a ring all-reduce."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from tf_strategies import errors, option_checks
from tf_strategies.collectives.algorithms import ring
from tf_strategies.keras import scope_checks
from tf_strategies.strategies.tpu import extended, permute, system

_RING, _BUILTIN = 'ring', 'builtin'


@option_checks.has_options
class TPURingStrategy(tf.distribute.TPUStrategy):
  """Synchronous training on TPUs whose all-reduce is a ring.

  Checked in the graph and in simulation; never run on a TPU.

  Beside `tf.distribute.TPUStrategy`:

  * Sums and means over replicas inside `run` are made of CollectivePermute ops.
    The gradients of a step are packed into one buffer a dtype: a ring over N
    replicas takes 2 (N - 1) permutes a dtype, however many variables there are.
  * Moving statistics of BatchNormalization are one mean value everywhere. Each
    costs an all-reduce of its own in every step.
  * All replicas agree whether gradients are finite.

  As before, `tf.IndexedSlices` become dense and are summed by CrossReplicaSum (an
  optimizer that clips them raises an error); replicas draw the same random numbers;
  reductions outside of `run` are made on the host. `fit` needs batches of static
  shape: batch with `drop_remainder=True`.

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
    all_reduce: 'ring', or 'builtin' for CrossReplicaSum.
    device_assignment: a `tf.tpu.experimental.DeviceAssignment` with one core a
      replica; None for TensorFlow's order.

  Raises:
    UnsupportedOptionError: no TPU, no resolver, a TPU that was not initialised,
      an unknown `all_reduce`, or more than one core a replica.
    ClusterConfigError: a resolver that fails, or does not answer within a minute.
  """

  def __init__(
    self,
    resolver: tf.distribute.cluster_resolver.TPUClusterResolver | None = None,
    all_reduce: str = _RING,
    device_assignment: tf.tpu.experimental.DeviceAssignment | None = None,
  ):
    option_checks.check_choice('all_reduce', all_reduce, (_RING, _BUILTIN))
    system.check_device_assignment(device_assignment)
    resolver, metadata = system.find(resolver)
    implementation = extended.PermutingTPUExtended(
      self, resolver, metadata, device_assignment
    )
    # TPUStrategy's own __init__ would build its own extended.
    tf.distribute.Strategy.__init__(self, implementation)
    scope_checks.note_created(self)
    # As TPUStrategy does: one handle in place of one a replica.
    self._enable_packed_variable_in_eager_mode = True
    if all_reduce == _RING:
      implementation.all_reduce = permute.PermutingAllReduce(
        ring.ring_all_reduce(self.num_replicas_in_sync)
      )

  def step(self, fn, optimizers=()):
    """Raises UnsupportedOptionError: no replica here computes a part of a step."""
    del fn, optimizers
    raise errors.UnsupportedOptionError(
      'strategy.step under TPURingStrategy',
      'another strategy of tf_strategies, which divides the step of one device',
      'call strategy.run, with a loss divided by the rows of the whole batch',
    )

  def scope(self) -> contextlib.AbstractContextManager:
    """See base class."""
    scope_checks.note_entered(self)
    return super().scope()
