"""What the strategies on the devices of one host have in common to users."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import _tf_internal, cross_device, errors


class ExactStrategy:
  """Mixed into a `tf.distribute.Strategy` on an `ExactMirroredExtended`."""

  @property
  def cross_device_ops(self) -> tf.distribute.CrossDeviceOps:
    """The op that every reduction of this strategy goes through."""
    return self.extended.cross_device_ops

  def communication_report(self) -> dict[str, object]:
    """What was communicated so far, counted by the graph as it ran.

    Returns:
      `cross_device_ops` (its class), `calls` of each kind, among them
      `all_reduce_in_control_flow` for those that TensorFlow's collectives did
      inside a branch, and `all_reduce_bytes_in` and `reduce_bytes_in`, bytes
      received by each device.
    """
    report = {'cross_device_ops': type(self.cross_device_ops).__name__}
    if isinstance(self.cross_device_ops, cross_device.ScheduledAllReduce):
      report = self.cross_device_ops.report()
    calls = dict(report.get('calls', {}))
    calls['all_reduce_in_control_flow'] = (
      self.extended.all_reduces_in_control_flow
    )
    return {**report, 'calls': calls}

  def reduce(self, reduce_op, value, axis):
    """Reduces `value` across replicas; see `tf.distribute.Strategy.reduce`.

    Keras reduces the first batch, a whole structure, to learn its shapes. Its
    replicas may have different numbers of rows, of which there is no mean: it
    then gets the first replica's part.
    """
    if axis is None and is_uneven_structure(value):
      return tf.nest.map_structure(
        lambda v: self.experimental_local_results(v)[0], value
      )
    return super().reduce(reduce_op, value, axis)


def check_cross_device_ops(cross_device_ops) -> None:
  """Refuses what is no cross-device op.

  Raises:
    UnsupportedOptionError: naming it.
  """
  if not isinstance(cross_device_ops, tf.distribute.CrossDeviceOps):
    raise errors.UnsupportedOptionError(
      f'cross_device_ops={cross_device_ops!r}',
      'an instance of tf.distribute.CrossDeviceOps',
      'pass for instance tfs.RingAllReduce()',
    )


def is_uneven_structure(value) -> bool:
  """Whether `value` is a structure of batches with replicas of uneven rows."""
  if isinstance(value, tf.distribute.DistributedValues):
    return False
  return any(
    len({v.shape[0] for v in leaf.values if v.shape.rank}) > 1
    for leaf in tf.nest.flatten(value)
    if isinstance(leaf, _tf_internal.PerReplica)
  )
