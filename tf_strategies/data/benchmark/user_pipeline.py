"""Finds the pipeline of a program by its name: `package.module:function`.

Example:

  >>> from tf_strategies.data.benchmark import user_pipeline
  >>> user_pipeline.split('my_program.input:train_dataset')
  ('my_program.input', 'train_dataset')
"""

from __future__ import annotations

import importlib
import os
import sys

import tensorflow as tf

from tf_strategies import errors

_ALLOWED = (
  'module:function, a function without arguments that returns a tf.data.Dataset'
)


def split(name: str) -> tuple[str, str]:
  """The module and the function that `name` names.

  Raises:
    UnsupportedOptionError: it names nothing of the kind.
  """
  module, colon, function = name.partition(':')
  parts = [*module.split('.'), function]
  if not colon or not all(part.isidentifier() for part in parts):
    _refuse(name, '', 'write --pipeline=my_package.my_module:make_dataset')
  return module, function


def load(name: str) -> tf.data.Dataset:
  """Calls the function that `name` names.

  Args:
    name: 'module:function'; the module is looked for in the current directory
      too.

  Returns:
    The dataset that it makes.

  Raises:
    UnsupportedOptionError: no such module or function, the function takes
      arguments, raises, or returns something else.
  """
  module_name, function_name = split(name)
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    module = importlib.import_module(module_name)
  except ImportError as e:
    _refuse(
      name,
      f' (cannot import {module_name}: {e})',
      'run the command where the module is, or set PYTHONPATH',
      e,
    )
  function = getattr(module, function_name, None)
  if not callable(function):
    _refuse(
      name,
      f' ({module_name} has no function {function_name})',
      'name a function of that module',
    )
  try:
    dataset = function()
  except Exception as e:
    _refuse(
      name,
      f' (it raised {type(e).__name__}: {e})',
      'make it run without arguments, on its own',
      e,
    )
  if not isinstance(dataset, tf.data.Dataset):
    _refuse(
      name,
      f' (it returned a {type(dataset).__name__})',
      'return the dataset, before strategies or iterators',
    )
  return dataset


def _refuse(name, what, way_out, cause=None):
  raise errors.UnsupportedOptionError(
    f'pipeline={name!r}{what}', _ALLOWED, way_out
  ) from cause
