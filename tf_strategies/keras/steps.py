"""Where Keras's training meets a strategy that runs steps elsewhere.

Keras calls `strategy.run(model.train_step, ...)` in a function that it keeps as
`model.train_function` and calls once a batch (or group of batches). A strategy
whose workers are other processes puts a function of its own in that place. That
is all it changes: `fit`, `evaluate` and `predict` stay Keras's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.keras import optimizer_checks

_KINDS = {
  'train_step': 'train',
  'test_step': 'test',
  'predict_step': 'predict',
}


@dataclasses.dataclass(frozen=True)
class KerasStep:
  """A model's own step.

  Attributes:
    model: whose step it is.
    kind: 'train', 'test' or 'predict'.
    run: the step, as Keras passed it.
  """

  model: keras.Model
  kind: str
  run: Callable[[Any], Any]

  def install(self, function: Callable[[Any], Any]) -> None:
    """Makes Keras call `function` from the next batch on."""
    setattr(self.model, f'{self.kind}_function', function)


def step_of(fn: Callable) -> KerasStep | None:
  """What `fn` is to Keras, if it is a model's train, test or predict step."""
  model = getattr(fn, '__self__', None)
  if isinstance(model, keras.Model):
    kind = _KINDS.get(fn.__name__)
    return KerasStep(model, kind, fn) if kind else None
  # `predict` passes a local function of the trainer around its step.
  module = getattr(fn, '__module__', '') or ''
  if not module.startswith('keras.src.backend.tensorflow'):
    return None
  for content in _closure(fn):
    found = step_of(content) if callable(content) else None
    if isinstance(content, keras.Model):
      found = KerasStep(content, 'predict', content.predict_step)
    if found:
      return dataclasses.replace(found, kind='predict')
  return None


def _closure(fn) -> Iterator[Any]:
  """What a local function refers to."""
  for cell in getattr(fn, '__closure__', None) or ():
    with contextlib.suppress(ValueError):  # The cell is still empty.
      yield cell.cell_contents


def optimizer_of_model(model: keras.Model) -> keras.optimizers.Optimizer | None:
  """The optimizer of a compiled model, with its variables made."""
  optimizer = getattr(model, 'optimizer', None)
  if optimizer is None:
    return None
  if not optimizer.built:
    optimizer.build(model.trainable_variables)
  return optimizer


def results_of(
  model: keras.Model, kind: str
) -> Callable[[], dict[str, Any]] | None:
  """What a model's own step reports, read from its metrics.

  None for a step that the user wrote, which may report anything.
  """
  step = getattr(type(model), f'{kind}_step', None)
  is_own = getattr(step, '__module__', '').startswith('keras.')
  return model.get_metrics_result if is_own and kind != 'predict' else None


def without_optionals(data: Any) -> Any:
  """A batch with None in place of the empty optionals that Keras yields."""
  return tf.nest.map_structure(
    lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf,
    data,
  )


def initial_shape(initial_value: Callable) -> tuple[int, ...] | None:
  """The shape of the variable that Keras is about to make, if it is Keras.

  Args:
    initial_value: what it passes to `tf.Variable`: a closure over its own
      variable.
  """
  for content in _closure(initial_value):
    if isinstance(content, keras.Variable):
      shape = content._shape  # pylint: disable=protected-access
      return None if shape is None else tuple(shape)
  return None


@contextlib.contextmanager
def capture_apply(
  optimizers: Sequence[keras.optimizers.Optimizer],
) -> Iterator[list[tuple[keras.optimizers.Optimizer, list, list | None]]]:
  """Makes `apply` of some optimizers record what it is given, for a while.

  For steps that are traced on a worker while their gradients are applied
  elsewhere. Clipping, accumulation and loss scaling all happen in `apply`, so
  they see the gradients that are applied, not one worker's.

  Yields:
    A list to which each call adds (optimizer, gradients, variables).
  """
  calls = []

  def recorder(optimizer):
    def apply(grads, trainable_variables=None):
      variables = trainable_variables
      if variables is not None:
        variables = list(variables)
      calls.append((optimizer, list(grads), variables))

    return apply

  for optimizer in optimizers:
    object.__setattr__(optimizer, 'apply', recorder(optimizer))
  try:
    yield calls
  finally:
    for optimizer in optimizers:
      object.__delattr__(optimizer, 'apply')


# These look at a variable as a whole, which a part is not.
_WHOLE_VARIABLE_OPTIMIZERS = ('Adafactor', 'Lamb', 'Muon')


def check_partitioned_update(fn: Callable, name: str) -> None:
  """Refuses optimizers whose update of a part is not part of the update.

  Args:
    fn: what Keras passes to `strategy.extended.update`.
    name: of the partitioned variable.

  Raises:
    UnsupportedOptionError: naming the optimizer and the variable.
  """
  optimizer = optimizer_checks.optimizer_of(fn)
  kind = type(optimizer).__name__
  if kind in _WHOLE_VARIABLE_OPTIMIZERS:
    raise errors.UnsupportedOptionError(
      f'{kind} with partitioned variable {name!r}',
      'optimizers that update each element by itself, such as Adam or SGD; '
      f'{kind} needs norms or means of the whole variable',
      'use another optimizer, or leave out variable_partitioner',
    )
