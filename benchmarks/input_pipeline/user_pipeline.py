"""The pipeline of a program by its name: `package.module:function`.

Example:

  >>> from benchmarks.input_pipeline import user_pipeline
  >>> user_pipeline.load('builtins:dict')
  Traceback (most recent call last):
    ...
  tf_strategies.errors.UnsupportedOptionError: pipeline='builtins:dict' (it returned a dict) is not supported. Expected module:function, a function without arguments that returns a tf.data.Dataset. Fix: return the dataset, before strategies or iterators.
"""

from __future__ import annotations

import tensorflow as tf

from examples.datasets import user_function
from tf_strategies import errors

OPTION = 'pipeline'
_ALLOWED = (
  'module:function, a function without arguments that returns a tf.data.Dataset'
)


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
  function = user_function.find(OPTION, name)
  try:
    dataset = function()
  except Exception as e:
    _refuse(
      name,
      f'it raised {type(e).__name__}: {e}',
      'make it run without arguments, on its own',
      e,
    )
  if not isinstance(dataset, tf.data.Dataset):
    _refuse(
      name,
      f'it returned a {type(dataset).__name__}',
      'return the dataset, before strategies or iterators',
    )
  return dataset


def _refuse(name, what, fix, cause=None):
  raise errors.UnsupportedOptionError(
    f'{OPTION}={name!r} ({what})', _ALLOWED, fix
  ) from cause
