"""Changes of `TPURingStrategy` to TensorFlow's TPU implementation."""

import itertools
import types

import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal, errors
from tf_strategies.keras import gradient_reducer
from tf_strategies.strategies.mirrored import variables
from tf_strategies.strategies.tpu import permute


class PermutingTPUExtended(
  _tf_internal.TPUExtended,
  gradient_reducer.GradientReducer,
):
  """TensorFlow's TPU implementation with our all-reduce."""

  builds_from_specs = True
  makes_variables_in_steps = False

  def __init__(self, container_strategy, resolver, metadata, device_assignment):
    super().__init__(
      container_strategy,
      # Asking the resolver again might fail.
      types.SimpleNamespace(get_tpu_system_metadata=lambda: metadata),
      device_assignment=device_assignment,
    )
    self._tpu_cluster_resolver = resolver
    # The op for sums over replicas; None for TensorFlow's own.
    self.all_reduce: permute.PermutingAllReduce | None = None

  # TensorFlow's sum over TPU replicas adds rows that one device keeps separate.
  sums_sparse_as_dense = True

  # Where code runs.

  def tpu_run(self, fn, args, kwargs, options=None):
    """Runs `fn` on all replicas; see `tf.distribute.TPUStrategy.run`."""
    step, strategy = _tf_internal.unwrap(fn), self._container_strategy()
    keras_step = _keras_internal.step_of(step)
    gradient_reducer.check_losses(step, strategy)
    if keras_step is not None and keras_step.kind == 'train':
      self._check_rows(args)
    return super().tpu_run(fn, args, kwargs, options)

  def _check_rows(self, batch) -> None:
    """Raises UnsupportedOptionError if replicas may get unequal numbers of rows."""
    for leaf in tf.nest.flatten(batch):
      for value in getattr(leaf, 'values', ()):
        shape = value.shape
        if shape.rank is None or (shape.rank and shape[0] is None):
          raise errors.UnsupportedOptionError(
            f'a batch of unknown size (shape {shape})',
            'batches of one static shape on TPUs',
            'batch the data set with drop_remainder=True',
          )

  # How values are reduced.

  def _reduce_to(self, reduce_op, value, destinations, options):
    if self._is_permuted(value):
      return self.all_reduce(reduce_op, [value])[0]
    return super()._reduce_to(reduce_op, value, destinations, options)

  def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
    values = [value for value, _ in value_destination_pairs]
    if gradient_reducer.are_gradients_reduced():
      return values
    are_permuted = list(map(self._is_permuted, values))
    permuted = list(itertools.compress(values, are_permuted))
    reduced = iter(self.all_reduce(reduce_op, permuted) if permuted else ())
    return [
      next(reduced)
      if is_permuted
      else super(PermutingTPUExtended, self)._reduce_to(
        reduce_op, *pair, options
      )
      for is_permuted, pair in zip(
        are_permuted, value_destination_pairs, strict=True
      )
    ]

  def _is_permuted(self, value) -> bool:
    """Returns whether `value` is dense and in a program for all TPU replicas."""
    is_dense = isinstance(
      value, tf.distribute.DistributedValues
    ) or tf.is_tensor(value)
    return (
      self.all_reduce is not None
      and is_dense
      and not isinstance(value, tf.IndexedSlices)
      and _tf_internal.enclosing_tpu_context() is not None
    )

  # How variables are created and updated.

  def _create_variable(self, next_creator, **kwargs):
    _keras_internal.see_gradients(self.apply_gradients)
    is_slot = kwargs.get('colocate_with') is not None
    kwargs = variables.creation_policy(kwargs, is_slot)
    return super()._create_variable(next_creator, **kwargs)
