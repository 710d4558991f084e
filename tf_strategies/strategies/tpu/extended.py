"""Changes of `TPURingStrategy` to TensorFlow's TPU implementation."""

import itertools
import types
import weakref

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, _tf_internal, errors, option_checks
from tf_strategies.keras import optimizer_wrapper
from tf_strategies.strategies.mirrored import extended as mirrored_extended
from tf_strategies.strategies.mirrored import run_context, variables
from tf_strategies.strategies.tpu import permute


class PermutingTPUExtended(
  _tf_internal.TPUExtended, mirrored_extended.AppliesSums
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

  # Where code runs.

  def tpu_run(self, fn, args, kwargs, options=None):
    """Runs `fn` on all replicas; see `tf.distribute.TPUStrategy.run`."""
    step = _keras_internal.step_of(fn)
    if step is not None:
      _check_losses(step.model, self._container_strategy())
      if step.kind == 'train':
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
    if run_context.are_gradients_reduced():
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

  def _apply_sums(self, optimizer, gradients, variables, apply):
    """See base class. TensorFlow adds rows that one device keeps separate."""
    gradients = [_dense(optimizer, g) for g in gradients]
    super()._apply_sums(optimizer, gradients, variables, apply)

  # How variables are created and updated.

  def _create_variable(self, next_creator, **kwargs):
    _keras_internal.see_gradients(self.apply_gradients)
    return super()._create_variable(
      next_creator, **variables.creation_policy(kwargs)
    )


def _dense(optimizer, gradient):
  """Returns a sparse gradient as a dense one.

  Raises:
    UnsupportedOptionError: if the optimizer clips it. It would clip sums of
      duplicate rows instead of the rows.
  """
  if not isinstance(gradient, tf.IndexedSlices):
    return gradient
  *_, optimizer = _keras_internal.chain(optimizer)
  if optimizer_wrapper.has_any(optimizer, optimizer_wrapper.CLIPPING):
    strategy = type(tf.distribute.get_strategy()).__name__
    raise errors.UnsupportedOptionError(
      f'{type(optimizer).__name__} that clips sparse gradients',
      f'dense gradients for clipping under {strategy}',
      'train the embedding without clipping, or look rows up by '
      'tf.one_hot(ids, depth) @ table, whose gradient is dense',
    )
  return tf.convert_to_tensor(gradient)


_warned_of_masks = weakref.WeakSet()


def _check_losses(
  model: keras.Model | None, strategy: tf.distribute.Strategy
) -> None:
  """Rejects losses that are wrong if Keras sees several replicas.

  Strategies whose steps are written for one device weight every loss
  themselves.

  Raises:
    UnsupportedOptionError: names the loss's reduction.
  """
  if strategy.num_replicas_in_sync == 1:
    return
  for loss in keras.tree.flatten(getattr(model, 'loss', None)):
    reduction = getattr(loss, 'reduction', 'sum_over_batch_size')
    name = f'{type(loss).__name__}(reduction={reduction!r})'
    option_checks.check(
      reduction != 'mean_with_sample_weight',
      f'{name} under {type(strategy).__name__}',
      "reduction='sum_over_batch_size'",
      "use 'sum_over_batch_size' with sample weights of mean 1. Otherwise "
      'each replica divides by the sum of its own weights',
    )
  masked = _keras_internal.masked_outputs(model)
  if masked and model not in _warned_of_masks:
    _warned_of_masks.add(model)
    logging.warning(
      'A mask reaches output %r of model %r. Keras divides the loss by the '
      'unmasked steps of each replica, so replicas with fewer of them count as '
      'much as the others, which is not what one device computes. For an exact '
      'result stop the mask before the loss and pass sample_weight.',
      masked[0].name,
      model.name,
    )
