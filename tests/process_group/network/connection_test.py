"""Connections alone, over socket pairs: sends never wait, nothing gets lost."""

import asyncio
import socket

from absl.testing import absltest

from tf_strategies.process_group.network import connection, protocol

_Kind = protocol.Kind


def _pair():
  ends = socket.socketpair()
  for end in ends:
    end.setblocking(False)
  return [connection.Connection(end) for end in ends]


class ConnectionTest(absltest.TestCase):
  def test_what_does_not_fit_is_sent_later_and_in_order(self):
    async def run():
      first, second = _pair()
      large = 'x' * 900_000
      for i in range(3):
        first.send(_Kind.REJECT, f'{i}{large}')
      self.assertTrue(first.pending)
      got = [(await second.expect(_Kind.REJECT))[1] for _ in range(3)]
      self.assertEqual(got, [f'{i}{large}' for i in range(3)])
      self.assertFalse(first.pending)
      # In the other direction meanwhile nothing was lost either.
      second.send(_Kind.READY)
      self.assertEqual(await first.expect(_Kind.READY), (_Kind.READY, None))
      first.close()
      second.close()

    asyncio.run(asyncio.wait_for(run(), 60))

  def test_send_to_a_peer_that_is_gone_is_noticed_by_who_receives(self):
    async def run():
      first, second = _pair()
      first.send(_Kind.HELLO, 'x' * 900_000)
      second.close()
      for _ in range(3):
        first.send(_Kind.HELLO, 'x')
      with self.assertRaises(ConnectionError):
        await first.receive()
      while first.pending:
        await asyncio.sleep(0.01)
      first.send(_Kind.HELLO, 'x')
      self.assertFalse(first.pending)
      first.close()

    asyncio.run(asyncio.wait_for(run(), 60))

  def test_can_be_closed_after_its_loop(self):
    async def run():
      first, second = _pair()
      first.send(_Kind.HELLO, 'x' * 900_000)
      self.assertTrue(first.pending)
      return first, second

    for one in asyncio.run(run()):
      one.close()
      self.assertEqual(one.sock.fileno(), -1)

  def test_other_kinds_and_other_bytes_are_refused(self):
    async def run():
      first, second = _pair()
      first.send(_Kind.HELLO)
      with self.assertRaisesRegex(protocol.ProtocolError, 'sent HELLO'):
        await second.expect(_Kind.PROPOSE)
      header = protocol.pack(_Kind.HELLO, 12345)[: protocol.HEADER_BYTES]
      for payload in (b'[' * 5, b'\xff' * 5):
        first.write(header + payload)
        with self.assertRaisesRegex(protocol.ProtocolError, 'not JSON'):
          await second.expect(_Kind.HELLO)
      first.close()
      second.close()

    asyncio.run(asyncio.wait_for(run(), 60))


if __name__ == '__main__':
  absltest.main()
