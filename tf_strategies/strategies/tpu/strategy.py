"""`TPURingStrategy`: TPU training with a ring all-reduce."""

import contextlib

import tensorflow as tf

from tf_strategies import errors, option_checks
from tf_strategies.collectives.algorithms import ring
from tf_strategies.keras import scope_checks
from tf_strategies.strategies.tpu import extended, permute, system

_RING, _BUILTIN = 'ring', 'builtin'


@option_checks.has_options
class TPURingStrategy(tf.distribute.TPUStrategy):
  """Synchronous training on TPUs with a ring all-reduce.

  Checked in the graph and in simulation; never run on a TPU.

  Differences from `tf.distribute.TPUStrategy`:

  * Sums and means over replicas inside `run` use CollectivePermute ops. The gradients
    of a step are packed into one buffer per dtype. A ring over N replicas takes
    2 (N - 1) permutes per dtype, for any number of variables.
  * Moving statistics of BatchNormalization are one mean value everywhere. Each needs
    its own all-reduce in every step.
  * All replicas agree whether gradients are finite.

  As in `tf.distribute.TPUStrategy`, `tf.IndexedSlices` become dense and are
  summed by CrossReplicaSum (an optimizer that clips them raises an error),
  replicas draw the same random numbers, and reductions outside `run` are made
  on the host. `fit` needs batches of static shape: batch with
  `drop_remainder=True`.

  Whether a ring of CollectivePermute is faster than CrossReplicaSum on a given
  TPU has not been measured. If it is slower, use 'builtin'.

  Example:

    >>> strategy = TPURingStrategy(
    ...   tf.distribute.cluster_resolver.TPUClusterResolver('local')
    ... )  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tf_strategies.errors.UnsupportedOptionError: Expected a TPU ...

  Args:
    resolver: resolver of a connected and initialised TPU; None uses the TPU that the
      environment names.
    all_reduce: 'ring', or 'builtin' for CrossReplicaSum.
    device_assignment: a `tf.tpu.experimental.DeviceAssignment` with one core per
      replica; None for TensorFlow's order.

  Raises:
    UnsupportedOptionError: if there is no TPU or resolver, the TPU was not initialised,
      `all_reduce` is unknown, or a replica has more than one core.
    ClusterConfigError: if the resolver fails or does not answer within a minute.
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
    # TPUStrategy's own __init__ would create its own extended.
    tf.distribute.Strategy.__init__(self, implementation)
    scope_checks.note_created(self)
    # TPUStrategy does the same: it uses one handle instead of one per replica.
    self._enable_packed_variable_in_eager_mode = True
    if all_reduce == _RING:
      implementation.all_reduce = permute.PermutingAllReduce(
        ring.ring_all_reduce(self.num_replicas_in_sync)
      )

  def step(self, fn, optimizers=()):
    """Raises UnsupportedOptionError: replicas here cannot compute a part of a step."""
    del fn, optimizers
    raise errors.UnsupportedOptionError(
      'strategy.step',
      'strategy.run under TPURingStrategy',
      'call strategy.run, with a loss divided by the rows of the whole batch',
    )

  def scope(self) -> contextlib.AbstractContextManager:
    """See base class."""
    scope_checks.note_entered(self)
    return super().scope()
