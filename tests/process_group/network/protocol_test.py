import struct

from absl.testing import absltest, parameterized

from tf_strategies.process_group.network import protocol

_VERSION = protocol.PROTOCOL_VERSION


class FrameTest(parameterized.TestCase):
  def test_lengths(self):
    frame = protocol.Frame(protocol.Kind.EXCHANGE, 7, 'täg', b'12345')
    data = frame.pack()
    lengths = protocol.frame_lengths(data[: protocol.FRAME_HEADER_BYTES])
    self.assertEqual(lengths, (protocol.Kind.EXCHANGE, 7, 4, 5))
    self.assertEqual(data[protocol.FRAME_HEADER_BYTES :], 'täg12345'.encode())

  @parameterized.named_parameters(
    ('magic', b'HTTP', _VERSION, 17, 0, 0),
    ('version', b'TFSC', _VERSION + 1, 17, 0, 0),
    ('kind', b'TFSC', _VERSION, 99, 0, 0),
    ('tag', b'TFSC', _VERSION, 17, 60_000, 0),
    ('payload', b'TFSC', _VERSION, 17, 0, 2**32 - 1),
  )
  def test_what_is_refused_before_anything_is_allocated(self, *fields):
    magic, version, kind, tag, payload = fields
    data = struct.pack('!4sBBHQI', magic, version, kind, tag, 1, payload)
    with self.assertRaises(protocol.ProtocolError):
      protocol.frame_lengths(data)


if __name__ == '__main__':
  absltest.main()
