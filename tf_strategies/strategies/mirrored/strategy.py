"""`RingMirroredStrategy`: synchronous replicas on the devices of one host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import cross_device, option_checks
from tf_strategies.cluster import workers as workers_lib
from tf_strategies.keras import scope_checks
from tf_strategies.strategies.mirrored import devices as devices_lib
from tf_strategies.strategies.mirrored import extended as extended_lib
from tf_strategies.strategies.mirrored import (
  loop_step,
  sharded_state,
  whole_batch,
)


class ExactStrategy:
  """Mixin for a `tf.distribute.Strategy` on an `ExactMirroredExtended`."""

  @property
  def cross_device_ops(self) -> tf.distribute.CrossDeviceOps:
    """The op that every reduction between devices of this process uses."""
    return self.extended.local_ops

  @property
  def num_replicas_in_sync(self) -> int:
    """Number of replicas. In a model's step it is one, because the step has the
    whole batch.
    """
    return 1 if whole_batch.is_active() else super().num_replicas_in_sync

  def scope(self) -> contextlib.AbstractContextManager:
    """See base class."""
    scope_checks.note_entered(self)
    return super().scope()

  def step(
    self, fn: Callable[..., Any], optimizers: Sequence[Any] = ()
  ) -> tf.types.experimental.PolymorphicFunction:
    """Returns a function that computes `fn` on whole batches, as one device would.

    Use it in your own training loop. Write `fn` for one device: forward pass, tape,
    `optimizer.apply`, metrics. It is traced once, and replicas share the rows of the
    batch, as in a step of `fit`. Means, sums, norms, clipping and random numbers
    therefore keep their meaning on batches of any size.

    Example:

      >>> import tensorflow as tf
      >>> strategy = RingMirroredStrategy(['CPU:0'])
      >>> with strategy.scope():
      ...   layer = tf.keras.layers.Dense(1, kernel_initializer='ones')
      ...   optimizer = tf.keras.optimizers.SGD(0.1)
      >>> @strategy.step
      ... def train_step(batch):
      ...   x, y = batch
      ...   with tf.GradientTape() as tape:
      ...     loss = tf.reduce_mean(tf.square(layer(x) - y))
      ...   weights = layer.trainable_weights
      ...   optimizer.apply(tape.gradient(loss, weights), weights)
      ...   return loss
      >>> data = tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1])))
      >>> for batch in strategy.experimental_distribute_dataset(data):
      ...   print(float(train_step(batch)))
      1.0

    Args:
      fn: function of distributed batches, and of other arguments that are equal on
        all workers. It returns tensors. The caller gets each once, not per replica.
      optimizers: the optimizers that `fn` applies, if one of them is a
        `tfs.keras.LocalSteps`. Parameter servers always need them.

    Returns:
      A `tf.function` with the arguments of `fn`.
    """
    return loop_step.make(self, fn, optimizers)

  def communication_report(self) -> dict[str, object]:
    """Returns counters of the communication so far, which running graphs update.

    They are `cross_device_ops` (a class), `calls` by kind, and `all_reduce_bytes_in`
    and `reduce_bytes_in`, the bytes that each device received.
    """
    ops = self.cross_device_ops
    if isinstance(ops, cross_device.ScheduledAllReduce):
      return ops.report()
    return {'cross_device_ops': type(ops).__name__, 'calls': {}}


@option_checks.has_options
class RingMirroredStrategy(ExactStrategy, tf.distribute.MirroredStrategy):
  """Mirrored training on one host, with one device's result.

  Differences from `tf.distribute.MirroredStrategy`:

  * Every reduction, broadcast and gather uses `cross_device_ops`, also for int32
    and to a CPU. Virtual GPUs, which NCCL rejects, work.
  * `gradient_accumulation_steps`, EMA with `ema_overwrite_frequency` and
    dynamic loss scaling work under Keras 3. All replicas agree whether
    gradients are finite.
  * Moving statistics of BatchNormalization are the same mean on all replicas.
  * A replica without rows in the last batch adds nothing, not NaN.
  * `step` runs a custom step as one device would.

  Example:

    >>> import tensorflow as tf
    >>> strategy = RingMirroredStrategy(['CPU:0'])
    >>> with strategy.scope():
    ...   model = tf.keras.Sequential([tf.keras.Input([3]),
    ...                                tf.keras.layers.Dense(1)])
    ...   model.compile('sgd', 'mse')
    >>> history = model.fit(tf.ones([8, 3]), tf.ones([8, 1]), verbose=0)

  Args:
    devices: list such as ['GPU:0']; None means all GPUs, or all logical CPUs if
      there is no GPU.
    cross_device_ops: op that reduces values; default `AutoAllReduce()`: NCCL
      between whole GPUs, otherwise this package's fastest algorithm.
    shard_optimizer_state: whether each device stores a part of the optimizer's
      state, such as the moments of Adam (ZeRO, stage 1). It applies to `fit` and
      `strategy.step`, not to `strategy.run`.

  Raises:
    UnsupportedOptionError: if a device does not exist or is listed twice, or if
      `cross_device_ops` is not a cross-device op.
  """

  # For strategies that differ in their exchange, or in where variables are.
  extended_class = extended_lib.ExactMirroredExtended

  def __init__(
    self,
    devices: Sequence[str | tf.config.LogicalDevice] | None = None,
    cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
    shard_optimizer_state: bool = False,
  ):
    workers_lib.check_alone('ring_mirrored')
    cross_device_ops = given_or_auto(cross_device_ops)
    option_checks.check_bool('shard_optimizer_state', shard_optimizer_state)
    extended = self.extended_class(
      self, devices_lib.resolve_devices(devices), cross_device_ops
    )
    if shard_optimizer_state:
      extended.state_shards = sharded_state.StateShards(extended)
    # MirroredStrategy's own __init__ would create its own extended.
    tf.distribute.Strategy.__init__(self, extended)


def given_or_auto(cross_device_ops) -> tf.distribute.CrossDeviceOps:
  """Returns the checked op that a strategy was given, or the default for None."""
  check_cross_device_ops(cross_device_ops)
  return cross_device_ops or cross_device.AutoAllReduce()


def check_cross_device_ops(cross_device_ops) -> None:
  """Raises UnsupportedOptionError unless the value is a cross-device op or None."""
  option_checks.check(
    isinstance(cross_device_ops, tf.distribute.CrossDeviceOps | None),
    f'cross_device_ops={cross_device_ops!r}',
    'an instance of tf.distribute.CrossDeviceOps',
    'pass for instance tfs.RingAllReduce()',
  )
