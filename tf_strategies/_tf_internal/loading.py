"""Loads private symbols of TensorFlow, with the reason for each."""

import importlib
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
