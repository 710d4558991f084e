"""Defines what an optimizer asks of a strategy, and which options are wrong there.

The `extended` of every strategy of this package is a `GradientReducer`. Keras's
`apply` goes through it, for every optimizer.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.spmd import program

_warned_of_masks = weakref.WeakSet()

# Options that depend on the norm or the size of a gradient.
CLIPPING = ('clipnorm', 'clipvalue', 'global_clipnorm')
# Optimizers that need a whole variable and cannot update a part.
WHOLE_VARIABLE_OPTIMIZERS = ('Adafactor', 'Lamb', 'Muon')
# Options with which an optimizer changes gradients before it applies them.
_COMPUTES = (*CLIPPING, 'gradient_accumulation_steps')

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


# TensorFlow's public name makes objects of a private class.
class Gradients(type(tf.distribute.experimental.CommunicationOptions())):
  """Tells a link that the tensors that it sums are gradients.

  Args:
    names: for each tensor, the name of the variable.
  """

  def __init__(self, names: Sequence[str]):
    super().__init__()
    self.names = names


class GradientReducer:
  """Sums the gradients of one step over replicas, then has them applied.

  The methods here are right for replicas that have equally many rows and a copy
  of each variable.

  Attributes:
    sums_sparse_as_dense: whether sparse gradients always become dense, so that
      duplicate rows are added before an optimizer sees them.
    applies_all_or_none: whether an update must not begin before all gradients have
      arrived. Counting the step is a part of the update.
    local_worker: interface of this worker for `LocalSteps`; None if workers cannot
      train apart.
    no_local_steps: expected value and fix for the error if they cannot.
    most_workers: largest possible number of workers.
  """

  sums_sparse_as_dense: bool = False
  applies_all_or_none: bool = False
  local_worker: Any = None
  most_workers: int = 1
  no_local_steps: tuple[str, str] = (
    'a ring of several workers, each with weights of its own',
    'leave out LocalSteps, or start a worker for each device and use '
    "tfs.create_strategy('multi_worker_ring')",
  )

  @contextlib.contextmanager
  def gradients_reduced(
    self, gradients: Sequence[Gradient | None] = ()
  ) -> Iterator[None]:
    """Makes an optimizer's own reductions do nothing inside the context.

    `gradients` are the reduced gradients, if they already exist.
    """
    before, _state.are_reduced = _state.are_reduced, True
    parts = []
    if self.applies_all_or_none and not tf.executing_eagerly():
      parts = tf.nest.flatten(list(gradients), expand_composites=True)
    try:
      with tf.control_dependencies([p for p in parts if p is not None]):
        yield
    finally:
      _state.are_reduced = before

  def mark_of(self, variable) -> int | None:
    """Returns the shards of a variable for `mark`; None if a step needs no marks."""

  def prepare(self, optimizer, variables) -> None:
    """Builds an optimizer before it gets the gradients of these variables."""
    if variables is not None and not optimizer.built:
      # Built here, not later in cross-replica context or in a branch there.
      with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)

  def warn_if_undivided(self, gradients) -> None:
    """Warns of gradients of a mean that its replica has not divided."""

  def reduce_and_apply(
    self,
    gradients: Sequence[Gradient],
    apply: Callable[[Sequence[Gradient]], None],
    variables: Sequence[Any] = (),
  ) -> None:
    """Sums this replica's gradients of `variables` over replicas.

    Passes the sums to `apply`.
    """
    context = tf.distribute.get_replica_context()
    reduced = list(gradients)
    if reduced:
      reduced = context.all_reduce(
        tf.distribute.ReduceOp.SUM, reduced, Gradients(names_of(variables))
      )
    apply(reduced)

  def apply_gradients(
    self, optimizer, grads, trainable_variables=None, **options
  ) -> None:
    """Applies gradients; the `apply` of each optimizer that is made in the scope.

    Sums them over replicas, unless they are already reduced, before Keras clips,
    accumulates or unscales them.

    Raises:
      UnsupportedOptionError: if it is not called in a step of the strategy.
    """
    gradients, variables = list(grads), trainable_variables
    if variables is not None:
      variables = list(variables)

    def apply(gradients):
      type(optimizer).apply(optimizer, gradients, variables, **options)

    if tf.distribute.get_strategy().extended is not self:
      if self.most_workers > 1:
        raise errors.UnsupportedOptionError(
          'a call outside of it',
          f"{type(optimizer).__name__}.apply inside the strategy's step",
          'pass the training step to strategy.step, or to strategy.run',
        )
      apply(gradients)
      return
    if tf.distribute.in_cross_replica_context():
      raise errors.UnsupportedOptionError(
        'a call in cross-replica context',
        f'{type(optimizer).__name__}.apply inside a step',
        'pass the training step to strategy.step, or to strategy.run',
      )
    self.prepare(optimizer, variables)
    trained = optimizer._trainable_variables if variables is None else variables
    if are_gradients_reduced() or self._num_replicas_in_sync == 1:
      for i, (gradient, variable) in enumerate(
        zip(gradients, trained, strict=False)
      ):
        shards = self.mark_of(variable)
        if shards is not None and isinstance(gradient, tf.Tensor):
          [name] = names_of([variable])
          gradients[i] = mark(gradient, name, shards)
      apply(gradients)
      return
    self.warn_if_undivided(gradients)
    self._apply_sums(optimizer, gradients, trained, apply)

  def _apply_sums(self, optimizer, gradients, variables, apply) -> None:
    """Calls `apply` with the sums of the replicas' gradients of some variables."""
    if self.sums_sparse_as_dense:
      gradients = [self._dense(optimizer, g) for g in gradients]
    parts = [g for g in gradients if g is not None]
    chain = [*_keras_internal.chain(optimizer)]
    if len(chain) > 1 or _has_any(chain[0], _COMPUTES):
      # Keras computes with these gradients. All replicas may apply one tensor
      # that was created outside the step. The copies make it count once per
      # replica.
      parts = tf.nest.map_structure(tf.identity, parts, expand_composites=True)
    trained = [
      v for g, v in zip(gradients, variables, strict=False) if g is not None
    ]

    def apply_reduced(summed):
      summed = iter(summed)
      reduced = [None if g is None else next(summed) for g in gradients]
      with self.gradients_reduced(reduced):
        apply(reduced)

    self.reduce_and_apply(parts, apply_reduced, trained)

  def _dense(self, optimizer, gradient):
    """Returns a sparse gradient as a dense one.

    Raises:
      UnsupportedOptionError: if the optimizer clips it. It would clip sums of
        duplicate rows instead of the rows.
    """
    if not isinstance(gradient, tf.IndexedSlices):
      return gradient
    *_, optimizer = _keras_internal.chain(optimizer)
    if _has_any(optimizer, CLIPPING):
      strategy = type(tf.distribute.get_strategy()).__name__
      raise errors.UnsupportedOptionError(
        f'{type(optimizer).__name__} that clips sparse gradients',
        f'dense gradients for clipping under {strategy}',
        'train the embedding without clipping, or look rows up by '
        'tf.one_hot(ids, depth) @ table, whose gradient is dense',
      )
    return tf.convert_to_tensor(gradient)


def names_of(variables: Iterable[Any]) -> list[str]:
  """Returns the names of variables, for timelines."""
  return [getattr(v, 'path', v.name) for v in variables]


def mark(gradient: tf.Tensor, variable: str, shards: int = 1) -> tf.Tensor:
  """Marks a tensor as a gradient in the graph that is being traced, and returns it.

  Args:
    gradient: what an optimizer gets.
    variable: name of the variable whose gradient it is.
    shards: number of its shards, of which each replica needs one.
  """
  marked = tf.identity(gradient)
  values = tf.compat.v1.AttrValue.ListValue(s=[variable.encode()], i=[shards])
  value = tf.compat.v1.AttrValue(list=values)
  marked.op._set_attr(program.GRADIENT, value)
  return marked


def current() -> GradientReducer:
  """Returns the reducer of the current strategy."""
  extended = tf.distribute.get_strategy().extended
  return (
    extended if isinstance(extended, GradientReducer) else GradientReducer()
  )


def check_local_steps(is_training: bool = False) -> None:
  """Raises UnsupportedOptionError if workers cannot train apart.

  Outside any strategy it raises only with `is_training`, because saved models
  are loaded there.
  """
  is_inside, reducer = tf.distribute.has_strategy(), current()
  if reducer.local_worker is not None or not (is_training or is_inside):
    return
  name = type(tf.distribute.get_strategy()).__name__
  raise errors.UnsupportedOptionError(
    f'LocalSteps under {name}' if is_inside else 'LocalSteps in no strategy',
    *reducer.no_local_steps,
  )


def _has_any(optimizer, options: Iterable[str]) -> bool:
  return any(getattr(optimizer, option, None) is not None for option in options)


class _Reduction(threading.local):
  are_reduced: bool = False


_state = _Reduction()


def are_gradients_reduced() -> bool:
  """Returns whether the calling thread is inside `gradients_reduced()`.

  Gradients are then equal on all replicas, and nothing is reduced again.
  """
  return _state.are_reduced


def check_step(fn: Any, optimizers: Any) -> None:
  """Raises UnsupportedOptionError for arguments that `strategy.step` rejects."""
  option_checks.check_function(
    'fn', fn, 'pass a function of a batch: strategy.step(train_step)'
  )
  option_checks.check(
    isinstance(optimizers, Sequence),
    f'optimizers={optimizers!r}',
    'a list of Keras optimizers',
    'write strategy.step(train_step, [optimizer])',
  )


def check_losses(fn: Callable, strategy: tf.distribute.Strategy) -> None:
  """Rejects losses that are wrong if Keras sees several replicas.

  Strategies whose steps are written for one device weight every loss
  themselves.

  Raises:
    UnsupportedOptionError: names the loss's reduction.
  """
  step = _keras_internal.step_of(fn)
  if strategy.num_replicas_in_sync == 1 or step is None:
    return
  for loss in keras.tree.flatten(getattr(step.model, 'loss', None)):
    _check_reduction(loss, type(strategy).__name__)
  masked = _keras_internal.masked_outputs(step.model)
  if masked and step.model not in _warned_of_masks:
    _warned_of_masks.add(step.model)
    logging.warning(
      'A mask reaches output %r of model %r. Keras divides the loss by the '
      'unmasked steps of each replica, so replicas with fewer of them count as '
      'much as the others, which is not what one device computes. For an exact '
      'result stop the mask before the loss and pass sample_weight.',
      masked[0].name,
      step.model.name,
    )


def _check_reduction(loss, strategy_name: str) -> None:
  reduction = getattr(loss, 'reduction', 'sum_over_batch_size')
  name = f'{type(loss).__name__}(reduction={reduction!r})'
  option_checks.check(
    reduction != 'mean_with_sample_weight',
    f'{name} under {strategy_name}',
    "reduction='sum_over_batch_size'",
    "use 'sum_over_batch_size' with sample weights of mean 1. Otherwise "
    'each replica divides by the sum of its own weights',
  )


def built_optimizer(model: keras.Model) -> keras.optimizers.Optimizer | None:
  """Returns the optimizer of a compiled model, after building it."""
  optimizer = getattr(model, 'optimizer', None)
  if optimizer is not None and not optimizer.built:
    optimizer.build(model.trainable_variables)
  return optimizer


def check_has_one_rule(
  optimizer: keras.optimizers.Optimizer, what: str
) -> None:
  """Rejects a `MultiOptimizer`, whose own update is never called.

  It chooses an optimizer by a variable's path, and an anchor has a different
  path.

  Raises:
    UnsupportedOptionError: names it as `what`.
  """
  option_checks.check(
    not hasattr(optimizer, 'optimizers'),
    what,
    'an optimizer with one rule for all variables',
    'pass an optimizer such as keras.optimizers.SGD(1.0), or wrap those that '
    'MultiOptimizer chooses from',
  )


def check_partitioned_update(fn: Callable, name: str) -> None:
  """Rejects optimizers that cannot update a part of a variable independently.

  Raises:
    UnsupportedOptionError: names the optimizer and the variable.
  """
  optimizer = _keras_internal.optimizer_of(fn)
  kind = type(optimizer).__name__
  option_checks.check(
    kind not in WHOLE_VARIABLE_OPTIMIZERS,
    f'{kind} with partitioned variable {name!r}',
    'an optimizer that updates each element by itself, such as Adam or SGD',
    'use another optimizer, or cut no variable: '
    'variable_partitioner=lambda shape, dtype: [1] * len(shape)',
  )
