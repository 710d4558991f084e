"""Checks of the values that a user passes: one typed error for each kind of value.

A check returns None or raises an `UnsupportedOptionError`, for any value, such as an
array or an integer beyond any float.

Example:

  >>> from tf_strategies import option_checks
  >>> option_checks.check_int('num_replicas', 4, least=1)
  >>> option_checks.check_choice('link', 'udp', ('tcp', 'mpi'))
  Traceback (most recent call last):
  ...
  tf_strategies.errors.UnsupportedOptionError: Expected one of 'tcp', 'mpi', got link='udp'. Fix: leave it out for the default.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import os
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from tf_strategies import errors

_FIX = 'leave it out for the default'
_Class = TypeVar('_Class', bound=type)


def check(is_allowed: object, received: str, expected: str, fix: str) -> None:
  """Raises UnsupportedOptionError(received, expected, fix) unless allowed."""
  if not is_allowed:
    raise errors.UnsupportedOptionError(received, expected, fix)


def check_choice(
  name: str, value: object, choices: Iterable[str], fix: str = _FIX
) -> None:
  """Raises unless a value is one of several strings. Suggests the nearest one."""
  choices = tuple(choices)
  # Each collective calls this, so the message is only made for an error.
  if not isinstance(value, str) or value not in choices:
    expected = f'one of {", ".join(map(repr, choices))}'
    meant = nearest(value, choices)
    fix = fix if meant is None else f'write {meant!r}'
    raise errors.UnsupportedOptionError(f'{name}={value!r}', expected, fix)


def nearest(value: object, choices: Iterable[str]) -> str | None:
  """Returns the choice that a misspelled string may stand for, if any."""
  if not isinstance(value, str):
    return None
  words = sorted(value.lower().split('_'))
  same_words = [c for c in choices if sorted(c.split('_')) == words]
  close = difflib.get_close_matches(value.lower(), choices, 1)
  return next(iter([*same_words, *close]), None)


def check_names(
  what: str,
  given: Iterable[str],
  known: Iterable[str],
  fix: str = 'leave it out',
  of: Callable[..., Any] | None = None,
) -> None:
  """Raises for option names that `what` does not have. Suggests the nearest one.

  If another option takes an object, the suggestion may be an option of that
  object. `of` is the function or class whose arguments are searched.
  """
  known = tuple(known)
  for name in given:
    if name not in known:
      near = nearest(name, known)
      meant = _inside(of, name) if near is None else repr(near)
      raise errors.UnsupportedOptionError(
        f'the option {name!r} of {what}',
        f'one of {", ".join(map(repr, known))}',
        fix if meant is None else f'write {meant}',
      )


def _inside(of: Callable[..., Any] | None, name: str) -> str | None:
  """Returns the dataclass among the arguments that has an option of a near name."""
  function: Any = of.__init__ if isinstance(of, type) else of
  try:
    hints = {} if function is None else typing.get_type_hints(function)
  except NameError:  # A type that only type checkers import.
    return None
  for argument, hint in hints.items():
    for kind in (hint, *typing.get_args(hint)):
      if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        meant = nearest(name, [f.name for f in dataclasses.fields(kind)])
        if meant is not None:
          return f'{argument}={kind.__name__}({meant}=...)'
  return None


def has_options(cls: _Class, fix: str = 'leave it out') -> _Class:
  """Decorates a class so that its constructor reports misspelt names of options.

  Python's own `TypeError` suggests no name. The signature stays. A frozen data class
  gets Python's own numbers in place of NumPy's.

  Example:

    >>> @has_options
    ... class Ring:
    ...   def __init__(self, link='tcp'):
    ...     self.link = link
    >>> Ring(lnik='mpi')
    Traceback (most recent call last):
    ...
    tf_strategies.errors.UnsupportedOptionError: Expected one of 'link', got the option 'lnik' of Ring. Fix: write 'link'.
    >>> inspect.signature(Ring)
    <Signature (link='tcp')>
  """
  init: Any = cls.__init__
  known = [*inspect.signature(init).parameters][1:]

  @functools.wraps(init)
  def checked(self, *args, **options):
    check_names(cls.__name__, options, known, fix, of=init)
    init(self, *args, **options)
    if dataclasses.is_dataclass(self):
      _keep_plain(self)

  cls.__init__ = checked
  return cls


def check_int(
  name: str,
  value: object,
  least: int,
  most: int | None = None,
  *,
  fix: str = _FIX,
) -> None:
  """Raises unless a value is an integer in a range; NumPy's integers pass."""
  if not is_int(value) or value < least or (most is not None and value > most):
    span = f'of at least {least}' if most is None else f'from {least} to {most}'
    raise errors.UnsupportedOptionError(
      f'{name}={value!r}', f'an integer {span}', fix
    )


def check_seconds(name: str, value: object, *, or_zero: bool = False) -> None:
  """Raises unless a value is a finite number of seconds above 0, or from 0."""
  is_allowed = is_number(value) and (value > 0 or (or_zero and value == 0))
  which = 'of at least 0' if or_zero else 'above 0'
  expected = f'a finite number of seconds {which}'
  check(is_allowed, f'{name}={value!r}', expected, _FIX)


def check_function(
  name: str,
  value: object,
  fix: str = 'pass the function itself',
  *,
  or_none: bool = False,
) -> None:
  """Raises unless a value is callable, or None if that is allowed."""
  is_allowed = callable(value) or (or_none and value is None)
  check(is_allowed, f'{name}={value!r}', 'a function', fix)


def check_bool(name: str, value: object, fix: str = _FIX) -> None:
  """Raises unless a value is True or False; NumPy's pass."""
  is_allowed = isinstance(value, bool | np.bool_)
  check(is_allowed, f'{name}={value!r}', 'True or False', fix)


def check_type(
  name: str,
  value: object,
  types: type | tuple[type, ...],
  expected: str,
  fix: str = _FIX,
) -> None:
  """Raises unless a value has one of the types. Names its type, not the value."""
  kind = type(value).__name__
  check(isinstance(value, types), f'{name} of type {kind}', expected, fix)


def check_local_path(name: str, value: object, fix: str) -> None:
  """Raises unless a value is a path, and neither empty nor the URL of an object store.

  It is for files that are renamed, locked, linked or appended to. Object stores
  cannot do that.
  """
  is_path = isinstance(value, str | os.PathLike) and os.fspath(value)
  check(is_path, f'{name}={value!r}', 'a path', fix)
  check(
    not is_remote(value),
    f'{name}={value!r}',
    'a path in a file system of this machine',
    'pass a local directory and copy what is written there, or mount the storage',
  )


def is_remote(path: object) -> bool:
  """Returns whether a path is a URL that TensorFlow can open, such as 'gs://a'."""
  return '://' in str(path)


def plain(value: object) -> object:
  """Returns NumPy's scalar as Python's own, for `json.dumps(..., default=plain)`."""
  if isinstance(value, np.generic):
    return value.item()
  raise TypeError(f'{type(value).__name__} is no value of JSON')


def _keep_plain(options: Any) -> None:
  """Replaces NumPy's scalars in a frozen data class by Python's own.

  Later, JSON, `time.sleep` and other functions would reject them.
  """
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    if isinstance(value, np.generic):
      object.__setattr__(options, field.name, plain(value))


def is_int(value: object) -> bool:
  """Returns whether the value is an integer, NumPy's included, and not a bool."""
  # True == 1 would silently pass for a world of one rank.
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
  """Returns whether the value is a finite real number, and not a bool."""
  if not isinstance(value, numbers.Real) or isinstance(value, bool):
    return False
  try:
    return math.isfinite(value)
  except OverflowError:  # An integer beyond any float.
    return False


def check_step(fn: Any, optimizers: Any) -> None:
  """Raises UnsupportedOptionError for arguments that `strategy.step` rejects."""
  check_function(
    'fn', fn, 'pass a function of a batch: strategy.step(train_step)'
  )
  check(
    isinstance(optimizers, Sequence)
    and all(hasattr(each, 'apply') for each in optimizers),
    f'optimizers={optimizers!r}',
    'a list of Keras optimizers',
    'write strategy.step(train_step, [optimizer])',
  )
