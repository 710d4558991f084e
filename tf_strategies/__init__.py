"""TensorFlow strategies that are exact under Keras 3.

>>> import tensorflow as tf
>>> import tf_strategies as tfs
>>> strategy = tfs.RingMirroredStrategy(devices=['CPU:0'])
>>> with strategy.scope():
...   model = tf.keras.Sequential([tf.keras.Input([3]),
...                                tf.keras.layers.Dense(1)])
...   model.compile('adam', 'mse')
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tf_strategies.version import __version__ as __version__

if TYPE_CHECKING:  # For readers and tools; see `_public`.
  from tf_strategies._public import *
else:  # Type checkers would assume that every name exists.

  def __getattr__(name: str) -> Any:
    # Each package is loaded separately; some do not need TensorFlow. Also internal
    # ones: `from tf_strategies import cross_device` calls this function first. The
    # public table would otherwise import the users of that package before it.
    if not name.startswith('__') and importlib.util.find_spec(
      f'{__name__}.{name}'
    ):
      return importlib.import_module(f'{__name__}.{name}')
    if name == '__all__' or not name.startswith('_'):
      public = importlib.import_module('tf_strategies._public')
      if name == '__all__':
        return [*public.__all__, '__version__']
      if name in public.__all__:
        return getattr(public, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

  def __dir__() -> list[str]:
    return sorted(__getattr__('__all__'))
