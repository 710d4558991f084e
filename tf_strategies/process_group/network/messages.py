"""The table of the control plane's messages: their keys and types.

Peers have proved that they belong to the job, but they may be broken. Code that
handles a message relies on its keys and types. A message that does not fit the table
is a ProtocolError, which ends the connection and names the peer.

Example:

  >>> goodbye = {'rank': 1, 'last': 7, 'has_ended': False}
  >>> check(protocol.Kind.GOODBYE, goodbye, world=2)
  >>> check(protocol.Kind.GOODBYE, {**goodbye, 'rank': 2}, world=2)
  Traceback (most recent call last):
  tf_strategies.process_group.network.protocol.ProtocolError: a GOODBYE that is {'has_ended': False, 'last': 7, 'rank': 2}
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from tf_strategies.process_group.network import protocol

# Ranks are not known before a group has formed.
ANY_WORLD = 1 << 32
_MOST = 1 << 63
# In the table: an integer below the number of ranks.
_RANK = object()

_FAILURE = {
  'error': (
    'WorkerUnavailableError',
    'CollectiveTimeoutError',
    'CollectiveMismatchError',
  ),
  'message': str,
  'rank': (None, _RANK),
  'address': (None, str),
  'tensor': (None, str),
  'step': (None, int),
  'ranks': [_RANK],
}
_CUT = {'task': int, 'incarnation': str, 'why': str, 'age': float}
_SEAT = {'task': int, 'address': str, 'incarnation': str, 'progress': int}
_NODE = {'version': str, 'host': str, 'counts': {str: int}, 'ports': [int]}

# See `_fits`.
_MESSAGES: Mapping[protocol.Kind, Any] = {
  protocol.Kind.HELLO: {
    'task': int,
    'incarnation': str,
    'version': str,
    'addresses': (None, {str: str}),
    'state': ('idle', 'forming', 'running', 'refused'),
    'generation': int,
    'progress': int,
    'group': str,
    'size': int,
    'leader': int,
    'missing': str,
    'refusal': str,
    'cuts': [_CUT],
  },
  protocol.Kind.PROPOSE: {'generation': int, 'seats': [_SEAT], 'gone': [int]},
  protocol.Kind.ACCEPT: None,
  protocol.Kind.REJECT: str,
  protocol.Kind.MESH: None,
  protocol.Kind.JOIN: {'rank': int, 'generation': int, 'incarnation': str},
  protocol.Kind.READY: None,
  protocol.Kind.COMMIT: None,
  protocol.Kind.HEARTBEAT: {'joiners': [int]},
  protocol.Kind.LATE: (None, [_RANK]),
  protocol.Kind.REPORT: (
    {'failure': _FAILURE},
    {
      'reporter': _RANK,
      'text': str,
      'sequence': int,
      'name': str,
      'seconds': (None, float),
      'ranks': [_RANK],
    },
  ),
  protocol.Kind.FAILED: _FAILURE,
  protocol.Kind.DESCRIBE: None,
  protocol.Kind.DESCRIPTION: {
    'sequence': int,
    'busy': bool,
    'name': str,
    'text': str,
    'seconds': float,
    'exchanges': {str: float},
    'call': str,
    'recent': {str: str},
  },
  protocol.Kind.GOODBYE: {'rank': _RANK, 'last': int, 'has_ended': bool},
  protocol.Kind.NODE: _NODE,
  protocol.Kind.JOB: [_NODE],
  protocol.Kind.STATE: {
    'node': int,
    'num_training': int,
    'has_ended_well': bool,
    'kind': str,
    'is_lost': bool,
    'failed': str,
    'status': int,
  },
}


def check(kind: protocol.Kind, message: Any, world: int = ANY_WORLD) -> None:
  """Raises ProtocolError unless a message is one of its kind.

  `world` is the number of ranks.
  """
  if kind not in _MESSAGES or not _fits(message, _MESSAGES[kind], world):
    raise protocol.ProtocolError(
      f'a {kind.name} that is {reprlib.repr(message)}'
    )


def _fits(value: Any, form: Any, world: int) -> bool:
  """Returns whether a value has a form of the table.

  A dictionary stands for one with these keys and no others, or with any keys of a
  type. A list stands for any number of one form, and a tuple for one of several
  forms. Anything but a type stands for itself.
  """
  if isinstance(form, dict):
    if not isinstance(value, dict):
      return False
    forms = dict.fromkeys(value, form[str]) if str in form else form
    return value.keys() == forms.keys() and all(
      _fits(value[key], forms[key], world) for key in forms
    )
  if isinstance(form, list):
    return isinstance(value, list) and all(
      _fits(one, form[0], world) for one in value
    )
  if isinstance(form, tuple):
    return any(_fits(value, one, world) for one in form)
  if form is _RANK:
    return type(value) is int and 0 <= value < world
  if form is int:
    return type(value) is int and abs(value) < _MOST
  if form is float:
    return type(value) in (int, float)
  return isinstance(value, form) if isinstance(form, type) else value == form
