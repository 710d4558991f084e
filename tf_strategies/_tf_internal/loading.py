"""Loads private symbols, and replaces functions, with the reason for each."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tf_strategies import _requirements


def load(path: str, why: str) -> Any:
  """Returns `tensorflow.python.<path>`, or raises UnsupportedVersionError."""
  path = f'tensorflow.python.{path}'
  module, _, name = path.rpartition('.')
  try:
    return getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError):
    raise _requirements.missing(path, why) from None


def change(owner: Any, signature: str, how: Callable, why: str) -> None:
  """Replaces a function by what `how` returns for it, after checking its signature."""
  _requirements.method(owner, signature, why)
  name = signature.partition('(')[0]
  function = getattr(owner, name)
  setattr(owner, name, functools.wraps(function)(how(function)))
