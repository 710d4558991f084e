"""What the messages of the control plane hold: one table, checked at the door.

Peers have proved that they belong to the job, yet may be broken: whoever handles
a message relies on its keys, types and ranges. Whatever is not in the table is a
ProtocolError, which ends the connection and names the peer.

Example:

  >>> goodbye = {'rank': 1, 'last': 7, 'has_ended': False}
  >>> check(protocol.Kind.GOODBYE, goodbye, world=2)
  >>> check(protocol.Kind.GOODBYE, {**goodbye, 'rank': 2}, world=2)
  Traceback (most recent call last):
  tf_strategies.process_group.network.protocol.ProtocolError: a GOODBYE with rank=2
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from tf_strategies.process_group.network import protocol

# Ranks are not known before a group has formed.
ANY_WORLD = 1 << 32
_MOST = (1 << 63) - 1

# Says whether a value is right, for a number of ranks.
_Check = Callable[[Any, int], bool]


def check(kind: protocol.Kind, message: Any, world: int = ANY_WORLD) -> None:
  """Raises ProtocolError unless a message is one of its kind.

  `world` is the number of ranks.
  """
  if kind not in _MESSAGES:
    raise protocol.ProtocolError(f'a {kind.name} carries no JSON')
  form = _MESSAGES[kind]
  if isinstance(form, dict) and isinstance(message, dict):
    for key, value in message.items():
      if key in form and not _fits(value, form[key], world):
        raise protocol.ProtocolError(
          f'a {kind.name} with {key}={_shown(value)}'
        )
  if not _fits(message, form, world):
    raise protocol.ProtocolError(f'a {kind.name} that is {_shown(message)}')


def check_sender(kind: protocol.Kind, sender: int, receiver: int) -> None:
  """Raises ProtocolError if that rank may not send this kind to the other."""
  if kind in _FROM_CENTER:
    is_right = sender == 0
  elif kind in _TO_CENTER:
    is_right = receiver == 0
  else:
    is_right = kind in _IN_GROUP
  if not is_right:
    raise protocol.ProtocolError(f'a {kind.name} from rank {sender}')


def _shown(value: Any) -> str:
  text = reprlib.repr(value)
  return text if len(text) <= 80 else f'{text[:77]}...'


def _fits(value: Any, form: Any, world: int) -> bool:
  """Returns whether a value has a form of the table.

  A dictionary stands for one with these keys and no others, a list for any number
  of one form, a tuple for one of several forms. A function says whether a value is
  right, for a number of ranks; anything else stands for itself.
  """
  if isinstance(form, dict):
    return (
      isinstance(value, dict)
      and value.keys() == form.keys()
      and all(_fits(value[key], form[key], world) for key in form)
    )
  if isinstance(form, list):
    return isinstance(value, list) and all(
      _fits(one, form[0], world) for one in value
    )
  if isinstance(form, tuple):
    return any(_fits(value, one, world) for one in form)
  return form(value, world) if callable(form) else value == form


def _text(value: Any, world: int) -> bool:
  return isinstance(value, str)


def _flag(value: Any, world: int) -> bool:
  return isinstance(value, bool)


def _is_int(value: Any, least: int, most: int) -> bool:
  return type(value) is int and least <= value <= most


def _count(value: Any, world: int) -> bool:
  return _is_int(value, 0, _MOST)


def _integer(value: Any, world: int) -> bool:
  return _is_int(value, -_MOST, _MOST)


def _rank(value: Any, world: int) -> bool:
  return _is_int(value, 0, world - 1)


def _seconds(value: Any, world: int) -> bool:
  is_number = type(value) in (int, float)
  return is_number and 0 <= value <= _MOST and math.isfinite(value)


def _some(form: Any) -> _Check:
  return lambda value, world: bool(value) and _fits(value, [form], world)


def _table(key: _Check, form: Any) -> _Check:
  return lambda value, world: (
    isinstance(value, dict)
    and all(key(k, world) and _fits(v, form, world) for k, v in value.items())
  )


def _number_as_text(value: Any, world: int) -> bool:
  return value.isascii() and value.isdecimal() and len(value) <= 19


_FAILURE = {
  'error': (
    'WorkerUnavailableError',
    'CollectiveTimeoutError',
    'CollectiveMismatchError',
  ),
  'message': _text,
  'rank': (None, _rank),
  'address': (None, _text),
  'tensor': (None, _text),
  'step': (None, _count),
  'ranks': [_rank],
}

_NODE = {
  'version': _text,
  'host': _text,
  'counts': _table(_text, _count),
  'ports': [_count],
}

_MESSAGES: Mapping[protocol.Kind, Any] = {
  protocol.Kind.HELLO: {
    'task': _count,
    'incarnation': _text,
    'version': _text,
    'cluster': _text,
    'addresses': (None, _table(_number_as_text, _text)),
    'state': ('idle', 'forming', 'running', 'refused'),
    'generation': _count,
    'progress': _integer,
    'group': _text,
    'size': _count,
    'leader': _count,
    'missing': _text,
    'refusal': _text,
  },
  protocol.Kind.PROPOSE: {
    'generation': _count,
    'seats': _some(
      {
        'task': _count,
        'address': _text,
        'incarnation': _text,
        'progress': _integer,
      }
    ),
    'gone': [_count],
  },
  protocol.Kind.ACCEPT: None,
  protocol.Kind.REJECT: _text,
  protocol.Kind.MESH: None,
  protocol.Kind.JOIN: {
    'rank': _count,
    'generation': _count,
    'incarnation': _text,
  },
  protocol.Kind.READY: None,
  protocol.Kind.COMMIT: None,
  protocol.Kind.CUT: {
    'task': _count,
    'why': _text,
    'age': _count,
  },
  protocol.Kind.HEARTBEAT: {
    'joiners': [_count],
  },
  protocol.Kind.LATE: _some(_rank),
  protocol.Kind.REPORT: (
    {
      'failure': _FAILURE,
    },
    {
      'reporter': _rank,
      'text': _text,
      'sequence': _count,
      'name': _text,
      'seconds': (None, _seconds),
      'ranks': [_rank],
    },
  ),
  protocol.Kind.FAILED: _FAILURE,
  protocol.Kind.DESCRIBE: None,
  protocol.Kind.DESCRIPTION: {
    'sequence': _count,
    'busy': _flag,
    'name': _text,
    'text': _text,
    'seconds': _seconds,
    'exchanges': _table(_text, _seconds),
    'call': _text,
    'recent': _table(_number_as_text, _text),
  },
  protocol.Kind.GOODBYE: {
    'rank': _rank,
    'last': _count,
    'has_ended': _flag,
  },
  protocol.Kind.NODE: _NODE,
  protocol.Kind.JOB: _some(_NODE),
  protocol.Kind.STATE: {
    'node': _count,
    'num_training': _count,
    'has_ended_well': _flag,
    'is_elastic': _flag,
    'is_lost': _flag,
    'failed': _text,
    'status': _integer,
  },
}

_FROM_CENTER = (
  protocol.Kind.RESULT,
  protocol.Kind.LATE,
  protocol.Kind.FAILED,
)
_TO_CENTER = (protocol.Kind.EXCHANGE, protocol.Kind.REPORT)
_IN_GROUP = (
  protocol.Kind.HEARTBEAT,
  protocol.Kind.DESCRIBE,
  protocol.Kind.DESCRIPTION,
  protocol.Kind.GOODBYE,
)
