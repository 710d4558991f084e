"""Changes of `TPURingStrategy` to TensorFlow's TPU implementation."""

from __future__ import annotations

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
      _Answered(metadata),
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
    permuted = [i for i, v in enumerate(values) if self._is_permuted(v)]
    if not permuted:
      return super()._batch_reduce_to(
        reduce_op, value_destination_pairs, options
      )
    results = [
      None
      if i in permuted
      else super(PermutingTPUExtended, self)._reduce_to(
        reduce_op, value, destination, options
      )
      for i, (value, destination) in enumerate(value_destination_pairs)
    ]
    reduced = self.all_reduce(reduce_op, [values[i] for i in permuted])
    for i, value in zip(permuted, reduced, strict=True):
      results[i] = value
    return results

  def _is_permuted(self, value) -> bool:
    """Returns whether `value` is dense and in a program that all replicas run."""
    is_dense = isinstance(
      value, tf.distribute.DistributedValues
    ) or tf.is_tensor(value)
    return (
      self.all_reduce is not None
      and is_dense
      and not isinstance(value, tf.IndexedSlices)
      and _in_tpu_program()
    )

  # How variables are created and updated.

  def _create_variable(self, next_creator, **kwargs):
    _keras_internal.see_gradients(self.apply_gradients)
    is_slot = kwargs.get('colocate_with') is not None
    kwargs = variables.creation_policy(kwargs, is_slot)
    return super()._create_variable(next_creator, **kwargs)


class _Answered:
  """Keeps the answers of a resolver, because asking it again might fail."""

  def __init__(self, metadata):
    self._metadata = metadata

  def get_tpu_system_metadata(self):
    return self._metadata


def _in_tpu_program() -> bool:
  """Returns whether a program for TPU replicas is being built."""
  return _tf_internal.enclosing_tpu_context() is not None
