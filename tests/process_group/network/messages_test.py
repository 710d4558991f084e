"""Nonsense from members that know the secret: every kind, every key."""

import asyncio
import copy
import dataclasses
import json
import socket
import struct

from absl.testing import absltest, parameterized

from tf_strategies.launch import tasks
from tf_strategies.process_group import failure_detection, options, state
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.network import connection, messages, protocol
from tf_strategies.process_group.rendezvous import membership

_Kind = protocol.Kind
_WORLD = 3
_MEMBERS = [state.Member(r, r, f'host-{r}:1') for r in range(_WORLD)]
_STATE = state.GroupState(_MEMBERS, 1, 1)
_FAILURE = _STATE.lost(2, 'died').to_json()
_SEAT = membership.Seat(0, 'a:1', 'life', 0)
_OPERATION = state.Operation(4, 'all_reduce', 'w', True)
_MISMATCH = failure_detection.suspicion(_OPERATION, [2])
_TIMEOUT = failure_detection.suspicion(_OPERATION, [2], 5.0)
_NODE = {
  'version': '1',
  'host': '10.0.0.1',
  'counts': {'worker': 2},
  'ports': [1, 2],
}
_MEMBERSHIP = membership.Membership(
  {0: 'a:1', 1: 'b:1'}, 0, 'life', options.GroupOptions()
)
_MEMBERSHIP.note_cut(membership.Cut(1, 'life 1', 'it does not answer', 2.0))
# What this program sends, by its own functions where there is one.
_VALID = [
  (_Kind.HELLO, _MEMBERSHIP.hello(5.0)),
  (
    _Kind.PROPOSE,
    {'generation': 1, 'seats': [dataclasses.asdict(_SEAT)], 'gone': [1]},
  ),
  (_Kind.ACCEPT, None),
  (_Kind.REJECT, 'it is running'),
  (_Kind.MESH, None),
  (_Kind.JOIN, {'rank': 1, 'generation': 1, 'incarnation': 'life'}),
  (_Kind.READY, None),
  (_Kind.COMMIT, None),
  (_Kind.HEARTBEAT, {'joiners': [2]}),
  (_Kind.LATE, [0, 2]),
  (_Kind.LATE, None),
  (_Kind.REPORT, {'failure': _FAILURE}),
  (_Kind.REPORT, {**_MISMATCH, 'reporter': 1}),
  (_Kind.REPORT, {**_TIMEOUT, 'reporter': 1}),
  (_Kind.FAILED, _FAILURE),
  (_Kind.DESCRIBE, None),
  (_Kind.DESCRIPTION, _STATE.describe()),
  (_Kind.GOODBYE, {'rank': 1, 'last': 3, 'has_ended': True}),
  (_Kind.NODE, _NODE),
  (_Kind.JOB, [_NODE, _NODE]),
  (
    _Kind.STATE,
    dataclasses.asdict(tasks.HostState(1, failed='worker 1', status=-9)),
  ),
]
_IN_BYTES = (_Kind.EXCHANGE, _Kind.RESULT)
_JUNK = (
  None,
  True,
  -1,
  _WORLD,
  1 << 70,
  0.5,
  'x',
  [],
  [None],
  [-1],
  [[]],
  {},
  {'x': None},
  {'-1': 'x'},
)


def _as_it_travels(message):
  return json.loads(json.dumps(message))


def _spoiled(message):
  """Messages that differ from a valid one in one thing."""
  yield from _JUNK
  if not isinstance(message, dict):
    return
  yield {**message, 'one more': 1}
  for key, value in message.items():
    yield {k: v for k, v in message.items() if k != key}
    for junk in _JUNK:
      yield {**message, key: junk}
    if isinstance(value, dict):
      for inner in _spoiled(value):
        yield {**message, key: inner}
    if isinstance(value, list) and value:
      for junk in _JUNK:
        yield {**message, key: [junk, *value[1:]]}


class TableTest(parameterized.TestCase):
  def test_every_kind_is_there(self):
    told = {kind for kind, _ in _VALID} | {*_IN_BYTES}
    self.assertEqual(told, set(_Kind))

  @parameterized.parameters(*_VALID)
  def test_message_of_another_form_is_refused(self, kind, message):
    message = _as_it_travels(message)
    messages.check(kind, message, _WORLD)
    if not isinstance(message, dict):
      wrong = [0.5, {'x': 1}]
    else:
      wrong = [{**message, 'one more': 1}]
      wrong += [{k: v for k, v in message.items() if k != m} for m in message]
      wrong += [{**message, key: {'x': [[]]}} for key in message]
    for spoiled in wrong:
      with self.assertRaisesRegex(protocol.ProtocolError, kind.name):
        messages.check(kind, spoiled, _WORLD)

  def test_ranks_are_members_of_the_group(self):
    for rank in (-1, _WORLD, 1.0, True):
      with self.assertRaises(protocol.ProtocolError):
        messages.check(
          _Kind.GOODBYE, {'rank': rank, 'last': 0, 'has_ended': False}, _WORLD
        )

  def test_deep_and_long_json_is_no_message(self):
    for payload in (b'[' * 500_000, b'1' * 100_000, b'\xff', b''):
      frame = protocol.Frame(_Kind.HELLO, payload=payload)
      with self.assertRaises(protocol.ProtocolError):
        connection.decode(frame)


class _Host:
  """What a control plane asks of its server."""

  def __init__(self, loop):
    self.loop = loop
    self.now = loop.time
    self.tasks = []

  def spawn(self, coroutine):
    self.tasks.append(self.loop.create_task(coroutine))
    return self.tasks[-1]


class FuzzTest(parameterized.TestCase):
  """Sends each to a control plane: it goes on, or fails with who sent it."""

  def setUp(self):
    super().setUp()
    self.problems = []

  async def _send(self, rank, frames):
    """What becomes of rank's group after frames of its one peer each."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, c: self.problems.append(c))
    outcomes = []
    for frame in frames:
      ends = socket.socketpair()
      for end in ends:
        end.setblocking(False)
      ours, theirs = map(connection.Connection, ends)
      shared = state.GroupState(_MEMBERS, rank, 1)
      host = _Host(loop)
      plane = control_plane.ControlPlane(
        host, shared, {1 - rank: ours}, options.GroupOptions()
      )
      plane.start()
      theirs.write(frame)
      theirs._sock.shutdown(socket.SHUT_WR)
      while shared.failure is None and not shared.departed:
        await asyncio.sleep(0)
      for task in host.tasks:
        task.cancel()
      for end in await asyncio.gather(*host.tasks, return_exceptions=True):
        if isinstance(end, Exception):
          self.problems.append(end)
      ours.close()
      theirs.close()
      outcomes.append(shared.failure)
    return outcomes

  @parameterized.parameters(0, 1)
  def test_every_kind_to_a_group(self, rank):
    frames = []
    for kind, message in _VALID:
      for spoiled in _spoiled(copy.deepcopy(_as_it_travels(message))):
        payload = json.dumps(spoiled).encode()
        frames.append(protocol.Frame(kind, 1, 'tag', payload).pack())
    for kind in _Kind:
      for payload in (
        b'',
        b'\xff' * 9,
        struct.pack('!Q', 1 << 63),
        struct.pack('!QQQ', 0, 0, 5),
        struct.pack('!QQQ', 0, 0, 0) + b'more',
      ):
        frames.append(protocol.Frame(kind, 1, 'tag', payload).pack())
    outcomes = asyncio.run(asyncio.wait_for(self._send(rank, frames), 300))
    self.assertEqual(self.problems, [])
    self.assertLen(outcomes, len(frames))
    failed = [outcome for outcome in outcomes if outcome is not None]
    self.assertGreater(len(failed), 1000)
    for outcome in failed:
      self.assertIn(outcome.error, state._ERRORS)
    broken = [o for o in failed if 'broke the protocol' in o.message]
    self.assertGreater(len(broken), 900)
    for outcome in broken:
      self.assertEqual(outcome.rank, 1 - rank)


if __name__ == '__main__':
  absltest.main()
