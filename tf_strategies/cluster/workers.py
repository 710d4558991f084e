"""How to find the link between the workers that a strategy trains on."""

from __future__ import annotations

from typing import Any


def link_of(strategy: Any) -> Any | None:
  """The `Communicator` of a `tf.distribute.Strategy`; None if it has none.

  Example:

    >>> import types
    >>> link = types.SimpleNamespace(communicator='the link')
    >>> link_of(types.SimpleNamespace(extended=link))
    'the link'
    >>> link_of(types.SimpleNamespace(extended=object()))
  """
  return getattr(strategy.extended, 'communicator', None)
