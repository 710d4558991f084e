"""Training with parameter servers."""

from tf_strategies.strategies.parameter_server.strategy import (
  ParameterServerStrategy,
)

__all__ = ['ParameterServerStrategy']
