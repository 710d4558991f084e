"""`CentralStorageStrategy`: one copy of each variable for all replicas."""

from __future__ import annotations

import types
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import (
  _keras_internal,
  _tf_internal,
  option_checks,
)
from tf_strategies.cluster import workers as workers_lib
from tf_strategies.strategies.central_storage import variables
from tf_strategies.strategies.mirrored import devices as devices_lib
from tf_strategies.strategies.mirrored import extended as mirrored_extended
from tf_strategies.strategies.mirrored import run_context
from tf_strategies.strategies.mirrored import strategy as mirrored_strategy
from tf_strategies.strategies.mirrored import variables as mirrored_variables


@option_checks.has_options
class CentralStorageStrategy(
  mirrored_strategy.ExactStrategy, tf.distribute.Strategy
):
  """Synchronous replicas that share one copy of each variable.

  Variables and the optimizer's state are on the parameter device, and replicas on
  the compute devices read them. In a step, each replica sends its gradient there
  once, and the optimizer updates each variable once. Use it if a compute device
  has no memory for the state. In each step, variables travel from the parameter
  device to each compute device.

  `tf.distribute.experimental.CentralStorageStrategy` has wrong metrics under
  Keras 3 and fails on BatchNormalization, EMA and loss scaling. Here metrics
  have a copy on each replica and are reduced when read; moving
  statistics are means over replicas; uneven batches, clipping and
  accumulation work as in `RingMirroredStrategy`.

  Example:

    >>> import tensorflow as tf
    >>> strategy = CentralStorageStrategy(['CPU:0'], 'CPU:0')
    >>> with strategy.scope():
    ...   v = tf.Variable([1.0, 2.0])
    >>> len(strategy.experimental_local_results(v))
    1

  Args:
    compute_devices: list such as ['GPU:0']; None means all GPUs, or all logical
      CPUs if there is no GPU.
    parameter_device: device of the variables; None means the host's CPU, or the
      GPU itself if it is the only compute device.
    cross_device_ops: op that reduces values; default `AutoAllReduce()`. Gradients
      go to the parameter device only.

  Raises:
    UnsupportedOptionError: if a device does not exist or is listed twice, or if
      `cross_device_ops` is not a cross-device op.
  """

  def __init__(
    self,
    compute_devices: Sequence[str | tf.config.LogicalDevice] | None = None,
    parameter_device: str | tf.config.LogicalDevice | None = None,
    cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
  ):
    workers_lib.check_alone('central_storage')
    cross_device_ops = mirrored_strategy.given_or_auto(cross_device_ops)
    devices = devices_lib.resolve_devices(compute_devices, 'compute_devices')
    super().__init__(
      CentralStorageExtended(
        self,
        devices,
        _resolve_parameter_device(parameter_device, devices),
        cross_device_ops,
      )
    )

  @property
  def parameter_device(self) -> str:
    """Full name of the device with the variables."""
    return self.extended.parameter_devices[0]


class CentralStorageExtended(mirrored_extended.ExactMirroredExtended):
  """The exact mirrored implementation, with one copy of each variable."""

  def __init__(
    self, container_strategy, devices, parameter_device, cross_device_ops
  ):
    super().__init__(container_strategy, devices, cross_device_ops)
    self.home_device = parameter_device

  @property
  def parameter_devices(self):
    """Returns the device with the variables, as a tuple of one."""
    return (self.home_device,)

  def reduce_and_apply(self, gradients, apply, variables) -> None:
    """Adds gradients on the parameter device, and applies them once."""
    if run_context.in_branch_of_replica():
      raise run_context.branch_error()

    def merge(strategy, gradients):
      reduced = strategy.extended.batch_reduce_to(
        tf.distribute.ReduceOp.SUM,
        [(g, self.home_device) for g in gradients],
      )
      with (
        tf.distribute.ReplicaContext(strategy, 0),
        tf.device(self.home_device),
      ):
        apply(reduced)

    tf.distribute.get_replica_context().merge_call(merge, args=(gradients,))

  def _per_replica(self, value):
    """See base class: every replica reads the same variable."""
    if isinstance(value, variables.CentralVariable):
      copies = [value.values[0].read_value()] * len(self._devices)
      value = _tf_internal.Mirrored(copies)
    return super()._per_replica(value)

  # Where code runs.

  @property
  def is_one_device(self):
    """See base class: variables may be on another device."""
    return super().is_one_device and self._devices == self.parameter_devices

  # How variables are created.

  _rewrap = staticmethod(variables.rewrap)

  def _creation_policy(self, kwargs):
    kwargs = mirrored_variables.creation_policy(kwargs)
    beside = kwargs.get('colocate_with')
    if beside is not None and not hasattr(beside, '_devices'):
      return kwargs  # It goes beside an object that has one device.
    name, on_read = kwargs.get('name'), tf.VariableSynchronization.ON_READ
    if kwargs.get('synchronization') == on_read or (
      _keras_internal.is_seed_state(name, kwargs.get('dtype'))
    ):
      return {**kwargs, 'colocate_with': None}  # It has copies.
    # Replicas that write without an aggregation write the same value (of a counter).
    # So they do to a loss scale, in a `tf.cond`, where a mean is impossible.
    none = tf.VariableAggregation.NONE, None
    if kwargs.get('aggregation') in none or _keras_internal.is_loss_scale(name):
      kwargs = {**kwargs, 'aggregation': variables.ON_FIRST}
    # TensorFlow reads the devices of a variable from this.
    central = types.SimpleNamespace(_devices=self.parameter_devices)
    return {**kwargs, 'colocate_with': central}


def _resolve_parameter_device(
  device: str | tf.config.LogicalDevice | None, compute_devices
) -> str:
  option_checks.check(
    isinstance(device, str | tf.config.LogicalDevice | None),
    f'parameter_device={device!r}',
    "the name of one device, such as 'CPU:0'",
    'leave it out to use the CPU of the host',
  )
  if device is None:
    only_gpu = len(compute_devices) == 1 and 'GPU' in compute_devices[0]
    device = compute_devices[0] if only_gpu else 'CPU:0'
  return devices_lib.resolve_devices([device], 'parameter_device')[0]
