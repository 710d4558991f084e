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
  wanted = _MESSAGES.get(kind)
  if wanted is None:
    raise protocol.ProtocolError(f'a {kind.name} carries no JSON')
  if isinstance(wanted, _Record) and isinstance(message, dict):
    for key, value in message.items():
      if key in wanted.fields and not wanted.fields[key](value, world):
        raise protocol.ProtocolError(
          f'a {kind.name} with {key}={_shown(value)}'
        )
  if not wanted(message, world):
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


class _Record:
  """A dictionary with these keys and no others."""

  def __init__(self, **fields: _Check):
    self.fields = fields

  def __call__(self, value: Any, world: int) -> bool:
    return (
      isinstance(value, dict)
      and value.keys() == self.fields.keys()
      and all(check(value[k], world) for k, check in self.fields.items())
    )


def _of_type(wanted: type) -> _Check:
  return lambda value, world: isinstance(value, wanted)


_nothing, _text, _flag = map(_of_type, (type(None), str, bool))


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


def _one_of(*values: Any) -> _Check:
  return lambda value, world: isinstance(value, str) and value in values


def _or_none(wanted: _Check) -> _Check:
  return lambda value, world: value is None or wanted(value, world)


def _either(*wanted: _Check) -> _Check:
  return lambda value, world: any(one(value, world) for one in wanted)


def _some(wanted: _Check, least: int = 0) -> _Check:
  return lambda value, world: (
    isinstance(value, list)
    and len(value) >= least
    and all(wanted(v, world) for v in value)
  )


def _row(*wanted: _Check) -> _Check:
  return lambda value, world: (
    isinstance(value, list)
    and len(value) == len(wanted)
    and all(one(v, world) for one, v in zip(wanted, value, strict=True))
  )


def _table(key: _Check, wanted: _Check) -> _Check:
  return lambda value, world: (
    isinstance(value, dict)
    and all(key(k, world) and wanted(v, world) for k, v in value.items())
  )


def _number_as_text(value: Any, world: int) -> bool:
  return value.isascii() and value.isdecimal() and len(value) <= 19


_FAILURE = _Record(
  error=_one_of(
    'WorkerUnavailableError',
    'CollectiveTimeoutError',
    'CollectiveMismatchError',
  ),
  message=_text,
  rank=_or_none(_rank),
  address=_or_none(_text),
  tensor=_or_none(_text),
  step=_or_none(_count),
  ranks=_some(_rank),
)

_NODE = _Record(
  version=_text,
  host=_text,
  counts=_table(_text, _count),
  ports=_some(_count),
)

_MESSAGES: Mapping[protocol.Kind, _Check] = {
  protocol.Kind.HELLO: _Record(
    task=_count,
    incarnation=_text,
    version=_text,
    cluster=_text,
    addresses=_or_none(_table(_number_as_text, _text)),
    state=_one_of('idle', 'forming', 'running', 'refused'),
    generation=_count,
    progress=_integer,
    group=_text,
    size=_count,
    leader=_count,
    missing=_text,
    refusal=_text,
  ),
  protocol.Kind.PROPOSE: _Record(
    generation=_count,
    seats=_some(_row(_count, _text, _text, _integer), least=1),
    gone=_some(_count),
  ),
  protocol.Kind.ACCEPT: _nothing,
  protocol.Kind.REJECT: _text,
  protocol.Kind.MESH: _nothing,
  protocol.Kind.JOIN: _Record(
    rank=_count, generation=_count, incarnation=_text
  ),
  protocol.Kind.READY: _nothing,
  protocol.Kind.COMMIT: _nothing,
  protocol.Kind.CUT: _Record(task=_count, why=_text, age=_count),
  protocol.Kind.HEARTBEAT: _Record(joiners=_some(_count)),
  protocol.Kind.LATE: _some(_rank, least=1),
  protocol.Kind.REPORT: _either(
    _Record(failure=_FAILURE),
    _Record(
      kind=_one_of('mismatch'),
      reporter=_rank,
      peer=_rank,
      sequence=_count,
      name=_text,
      text=_text,
    ),
    _Record(
      kind=_one_of('timeout'),
      reporter=_rank,
      text=_text,
      sequence=_count,
      name=_text,
      seconds=_seconds,
      waiting=_some(_rank),
    ),
  ),
  protocol.Kind.FAILED: _FAILURE,
  protocol.Kind.DESCRIBE: _nothing,
  protocol.Kind.DESCRIPTION: _Record(
    sequence=_count,
    busy=_flag,
    name=_text,
    text=_text,
    seconds=_seconds,
    exchanges=_table(_text, _seconds),
    call=_text,
    recent=_table(_number_as_text, _text),
  ),
  protocol.Kind.GOODBYE: _Record(rank=_rank, last=_count, has_ended=_flag),
  protocol.Kind.NODE: _NODE,
  protocol.Kind.JOB: _some(_NODE, least=1),
  protocol.Kind.TASK: _Record(
    task=_text,
    status=_or_none(_integer),
    losses=_count,
    failed=_flag,
    kind=_one_of('', 'fixed', 'elastic'),
  ),
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
