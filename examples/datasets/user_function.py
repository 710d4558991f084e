"""Finds a function of a user's program by its name: `package.module:function`.

Example:

  >>> from examples.datasets import user_function
  >>> user_function.split('convert', 'my_program.input:read')
  ('my_program.input', 'read')
  >>> user_function.find('convert', 'os.path:basename')('raw/a.csv')
  'a.csv'
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from tf_strategies import errors


def split(option: str, name: str) -> tuple[str, str]:
  """Splits a name into module and function.

  Args:
    option: option that contains the name.
    name: 'module:function'.

  Raises:
    UnsupportedOptionError: if the name has another form.
  """
  module, colon, function = name.partition(':')
  parts = [*module.split('.'), function]
  if not colon or not all(part.isidentifier() for part in parts):
    raise errors.UnsupportedOptionError(
      f'{option}={name!r}',
      'the name of a function as module:function',
      f'write --{option}=my_package.my_module:my_function',
    )
  return module, function


def find(option: str, name: str) -> Callable[..., Any]:
  """Imports the function with this name.

  Args:
    option: option that contains the name.
    name: 'module:function'. The module may also be in the current directory, as for
      `python -m`.

  Raises:
    UnsupportedOptionError: if there is no such module or function.
  """
  module_name, function_name = split(option, name)
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    module = importlib.import_module(module_name)
  except ImportError as e:
    raise errors.UnsupportedOptionError(
      f'{option}={name!r} (cannot import {module_name}: {e})',
      'a module that can be imported',
      'run the command where the module is, or set PYTHONPATH',
    ) from e
  function = getattr(module, function_name, None)
  if not callable(function):
    raise errors.UnsupportedOptionError(
      f'{option}={name!r} ({module_name} has no function {function_name})',
      'a function of the module',
      'name a function of that module',
    )
  return function
