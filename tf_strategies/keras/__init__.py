"""Code that depends on Keras: optimizer wrappers, layers and checks."""

from tf_strategies.keras.chief_only import ChiefOnly
from tf_strategies.keras.local_steps import LocalSteps
from tf_strategies.keras.tables.dynamic_embedding import DynamicEmbedding
from tf_strategies.keras.tables.lazy_rows import LazyRows

__all__ = [
  'ChiefOnly',
  'DynamicEmbedding',
  'LazyRows',
  'LocalSteps',
]


def __dir__() -> list[str]:
  return __all__
