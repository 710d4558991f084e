"""Fingerprints of functions, the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def of_function(function: Callable[..., Any] | None) -> str:
  """A name for a function's source, defaults, simple closures and arguments.

  What it calls is not looked at, nor objects without a value that is the same in
  all processes.
  """
  return hashlib.sha256(repr(_parts(function)).encode()).hexdigest()[:16]


def of_graph(
  function: Callable[..., Any], spec: tf.TensorSpec | tuple[tf.TensorSpec, ...]
) -> str:
  """A name for the graph of a function: also what it calls and captures.

  Falls back on `of_function` where the graph has no fingerprint, or another one
  with each trace, as it has around `tf.numpy_function`.
  """
  try:
    with tf.init_scope():
      first, second = (_fingerprint(function, spec) for _ in range(2))
  except tf.errors.OpError:
    return of_function(function)
  return f'{first:016x}' if first == second else of_function(function)


def _fingerprint(function, spec) -> int:
  nothing = tf.data.Dataset.from_tensors(
    tf.nest.map_structure(
      lambda s: tf.zeros([d or 0 for d in s.shape], s.dtype), spec
    )
  )
  # As `map` sees it in the pipeline: with a batch dimension that may vary.
  variable = tf.data.experimental.from_variant(
    tf.data.experimental.to_variant(nothing), spec
  )
  variant = tf.data.experimental.to_variant(variable.map(function))
  return int(tf.raw_ops.DatasetFingerprint(input_dataset=variant).numpy())


def _parts(function) -> tuple:
  if isinstance(function, functools.partial):
    return (
      'partial',
      _parts(function.func),
      _values(function.args),
      _values(sorted(function.keywords.items())),
    )
  function = inspect.unwrap(getattr(function, 'python_function', function))
  function = getattr(function, '__func__', function)
  name = getattr(function, '__qualname__', type(function).__qualname__)
  parts = (getattr(function, '__module__', None), name, _source(function))
  if not isinstance(function, types.FunctionType):
    return parts
  values = [*map(_content, function.__closure__ or ())]
  values += function.__defaults__ or ()
  return (*parts, tuple(v if isinstance(v, _SIMPLE) else '' for v in values))


def _values(argument):
  """What is the same in all processes: simple values, nested or alone."""
  if isinstance(argument, list | tuple):
    return tuple(map(_values, argument))
  if isinstance(argument, dict):
    return _values(list(argument.items()))
  # The repr of any other object may hold its address.
  return argument if isinstance(argument, _SIMPLE) else ''


def _content(cell):
  try:
    return cell.cell_contents
  except ValueError:  # Of a variable that is assigned later.
    return None


def _source(function) -> str:
  for candidate in (function, type(function)):
    try:
      return inspect.getsource(candidate)
    except (OSError, TypeError):
      continue
  code = getattr(function, '__code__', None)
  return '' if code is None else code.co_code.hex() + repr(code.co_names)
