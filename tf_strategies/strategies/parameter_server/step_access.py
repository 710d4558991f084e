"""The variables that a worker's step uses, and the writes at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.strategies.parameter_server import packing

_Variables = dict[int, tf.Variable]


@dataclasses.dataclass
class Access:
  """What the first trace found: variables by id, in order of first use."""

  # Read outside of updates on their own server; of them, by updates on another.
  reads: _Variables = dataclasses.field(default_factory=dict)
  update_reads: _Variables = dataclasses.field(default_factory=dict)
  # Written inside of a branch or a loop, where no state of the step can be
  # carried along: these are never held in it.
  nested_writes: _Variables = dataclasses.field(default_factory=dict)
  # Written; of them, in updates.
  written: _Variables = dataclasses.field(default_factory=dict)
  # Small, of whole numbers; whether each was read outside of branches and loops
  # before any of those wrote it.
  numbers: dict[int, tuple[tf.Variable, bool]] = dataclasses.field(
    default_factory=dict
  )
  updated: _Variables = dataclasses.field(default_factory=dict)
  # Updates that return something, or write on another server; their reads there.
  direct: set[int] = dataclasses.field(default_factory=set)
  elsewhere: dict[int, set[int]] = dataclasses.field(default_factory=dict)

  def note_number(self, variable: tf.Variable, is_nested: bool) -> None:
    """Notes a read of a variable, outside of updates, that a choice may depend on."""
    dtype, key = variable.dtype, id(variable)
    if (
      (dtype.is_integer or dtype.is_bool)
      and packing.is_small(variable.shape, dtype)
      and variable.shape.num_elements()
      and key not in self.nested_writes
    ):
      is_outside = not is_nested or self.numbers.get(key, (None, False))[1]
      self.numbers[key] = variable, is_outside

  def choices(self) -> list[tf.Variable]:
    """Returns the integer variables that may decide what the step writes."""
    if not self.nested_writes:
      return []
    return [
      variable
      for key, (variable, is_outside) in self.numbers.items()
      if is_outside or key not in self.nested_writes
    ]


@dataclasses.dataclass
class Write:
  """A write that the step holds back."""

  variable: tf.Variable
  value: tf.Tensor  # After all writes so far.
  delta: tf.Tensor | None  # Added in all; None if it was overwritten.

  def to_send(self) -> tf.Tensor:
    """Returns the tensor for the variable's server: the sum, or the whole value."""
    shape, dtype = self.variable.shape, self.variable.dtype
    tensor = tf.cast(self.value if self.delta is None else self.delta, dtype)
    if tensor.shape != shape and shape.is_fully_defined():
      tensor = tf.broadcast_to(tensor, shape)
    # Kept: it may be sent before the end.
    setattr(self, 'value' if self.delta is None else 'delta', tensor)
    return tensor


def additive_delta(value: tf.Tensor, old: tf.Tensor) -> tf.Tensor | None:
  """Returns the difference between `value` and `old`; None if it was no addition.

  Keras writes `assign(self + delta)`. Two workers that do so overwrite each
  other's addition; two that add do not.
  """
  value, old = origin(value), origin(old)
  if value.op.type not in ('AddV2', 'Add', 'Sub'):
    return None
  left, right = value.op.inputs
  if origin(left) is old:
    return -right if value.op.type == 'Sub' else right
  if origin(right) is old and value.op.type != 'Sub':
    return left
  return None


def origin(tensor):
  """The tensor that identities lead back to."""
  while tensor.op.type == 'Identity':
    tensor = tensor.op.inputs[0]
  return tensor


def check_writes(function: _tf_internal.CalledFunction) -> None:
  """Refuses a function past the step that writes.

  A step that is repeated, as its worker died, would write it again.

  Raises:
    UnsupportedOptionError: if it may write a variable.
  """
  if function.written:
    raise _refusal(function, function.written, 'writes')


def check_reads(
  function: _tf_internal.CalledFunction, written: Iterable[tf.Variable]
) -> None:
  """Refuses a function past the step that reads what the step has written.

  What the step has written is not on the server yet, or is a copy's.

  Raises:
    UnsupportedOptionError: if it reads one of these variables.
  """
  handles = {id(variable.handle) for variable in written}
  found = [handle for handle in function.read if id(handle) in handles]
  if found:
    raise _refusal(function, found, 'reads, after the step wrote it,')


def _refusal(function, handles, does):
  devices = ', '.join(sorted({handle.device for handle in handles}))
  return errors.UnsupportedOptionError(
    f'function {function.name!r} in a step on workers, which {does} '
    f'variables on {devices},',
    'a tf.function that is called itself: it is traced as a part of the step',
    'call the tf.function, not what get_concrete_function() or '
    'tf.saved_model.load() returns; and without jit_compile=True where it writes',
  )
