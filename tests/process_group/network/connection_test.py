"""Connections over socket pairs: sends never block, and no message is lost."""

import asyncio
import socket
import struct

from absl.testing import absltest, parameterized

from tf_strategies.process_group.network import connection, protocol

_Kind = protocol.Kind


def _pair():
  ends = socket.socketpair()
  for end in ends:
    end.setblocking(False)
  return [connection.Connection(end) for end in ends]


class ConnectionTest(absltest.TestCase):
  def test_large_messages_are_sent_later_and_in_order(self):
    async def run():
      first, second = _pair()
      large = 'x' * 900_000
      for i in range(3):
        first.send(_Kind.REJECT, f'{i}{large}')
      self.assertTrue(first.pending)
      got = [(await second.expect(_Kind.REJECT))[1] for _ in range(3)]
      self.assertEqual(got, [f'{i}{large}' for i in range(3)])
      self.assertFalse(first.pending)
      # The other direction still works.
      second.send(_Kind.READY)
      self.assertEqual(await first.expect(_Kind.READY), (_Kind.READY, None))
      first.close()
      second.close()

    asyncio.run(asyncio.wait_for(run(), 60))


_VERSION = protocol.PROTOCOL_VERSION


class FrameTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('magic', b'HTTP', _VERSION, 17, 0),
    ('version', b'TFSC', _VERSION + 1, 17, 0),
    ('kind', b'TFSC', _VERSION, 99, 0),
    ('payload', b'TFSC', _VERSION, 17, 101),
  )
  def test_invalid_header_is_refused(self, *fields):
    with self.assertRaises(protocol.ProtocolError):
      protocol.unpack_header(struct.pack('!4sBBI', *fields), 100)

  def test_deeply_nested_json_is_refused(self):
    with self.assertRaises(protocol.ProtocolError):
      protocol.unpack(protocol.Kind.HELLO, b'[' * 500_000)


if __name__ == '__main__':
  absltest.main()
