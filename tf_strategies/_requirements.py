"""Checks at import that other packages still contain the internals that we use.

If a release lacks one of the names in `_tf_internal` and `_keras_internal`, the
error names it and the tested versions. Otherwise the result would be wrong
numbers or an obscure traceback. All functions here raise
UnsupportedVersionError. `why` is the reason for which this package needs the
name.
"""

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from tf_strategies import errors

_TESTED = 'TensorFlow 2.18 to 2.21 with Keras 3.12 to 3.15'


def missing(what: str, why: str) -> errors.UnsupportedVersionError:
  """Returns the error for a name that is missing or not as expected."""
  installed = ' and '.join(
    f'{name} {sys.modules[module].__version__}'
    for name, module in (('TensorFlow', 'tensorflow'), ('Keras', 'keras'))
    if hasattr(sys.modules.get(module), '__version__')
  )
  return errors.UnsupportedVersionError(
    f'Expected {what} (needed: {why}), which {installed} does not have. '
    f'Fix: install a tested version: {_TESTED}.'
  )


def attribute(owner: Any, name: str, why: str) -> Any:
  """Returns `owner.<name>`."""
  try:
    return inspect.getattr_static(owner, name)
  except AttributeError:
    raise missing(f'{_name(owner)}.{name}', why) from None


def method(owner: Any, signature: str, why: str) -> None:
  """Checks for a method such as 'run(fn, args)', or a property such as 'name'."""
  name, _, parameters = signature.rstrip(')').partition('(')
  function = attribute(owner, name, why)
  found = []
  if not isinstance(function, property):
    found = inspect.signature(inspect.unwrap(function)).parameters
  if ', '.join(p for p in found if p != 'self') != parameters:
    raise missing(f'{_name(owner)}.{signature}', why)


def needs(why: str, owner: Any, *members: str) -> None:
  """Checks for members of an owner, and for what they mention.

  Args:
    why: the reason.
    owner: a class or module.
    *members: each a name, or a signature as of `method`; and behind a colon the
      names that it mentions, as in 'build(variables): _trainable_variables'.
  """
  for member in members:
    signature, _, names = member.partition(': ')
    name = signature.partition('(')[0]
    attribute(owner, name, why)
    if name != signature:
      method(owner, signature, why)
    if names:
      mention(getattr(owner, name), names.split(), why)


def mention(function: Any, names: Sequence[str], why: str) -> None:
  """Checks that a function, or one inside it, mentions variables or strings."""
  function = inspect.unwrap(function)
  found = _names_in(function.__code__)
  for name in names:
    if name not in found:
      what = f'{name!r} in {function.__module__}.{function.__qualname__}'
      raise missing(what, why)


def _names_in(code) -> set[str]:
  """Returns the names and string constants of a code object, including nested ones."""
  names = {*code.co_names, *code.co_varnames, *code.co_freevars}
  for constant in code.co_consts:
    if isinstance(constant, str):
      names.add(constant)
    elif inspect.iscode(constant):
      names |= {constant.co_name} | _names_in(constant)
  return names


def _name(owner: Any) -> str:
  if inspect.ismodule(owner):
    return owner.__name__
  return f'{owner.__module__}.{owner.__qualname__}'
