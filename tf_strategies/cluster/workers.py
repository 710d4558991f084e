"""How to find the link between the workers that a strategy trains on."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class LinkedWorkers(Protocol):
  """What the `extended` of a strategy on several workers implements.

  Attributes:
    communicator: the link, a `strategies.communicator.Communicator`.
  """

  communicator: Any


def link_of(strategy: Any) -> Any | None:
  """The communicator of a `tf.distribute.Strategy`; None if it has none.

  Example:

    >>> import types
    >>> link = types.SimpleNamespace(communicator='the link')
    >>> link_of(types.SimpleNamespace(extended=link))
    'the link'
    >>> link_of(types.SimpleNamespace(extended=object()))
  """
  extended = strategy.extended
  return extended.communicator if isinstance(extended, LinkedWorkers) else None
