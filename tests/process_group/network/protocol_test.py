import struct

from absl.testing import absltest, parameterized

from tf_strategies.process_group.network import protocol

_VERSION = protocol.PROTOCOL_VERSION


class DataHeaderTest(parameterized.TestCase):
  def test_round_trip(self):
    header = protocol.DataHeader(
      'all_reduce', 3, 2**40, 'ring', 'sum', 'float32', 10**12, 4, 2**32 - 1
    )
    self.assertLen(header.pack(), protocol.DATA_HEADER_BYTES)
    self.assertEqual(protocol.DataHeader.unpack(header.pack()), header)

  @parameterized.parameters(0, 4)
  def test_other_bytes_are_no_header(self, place):
    data = bytearray(protocol.DataHeader('a', 1, 1, '', '', '', 0, 0, 0).pack())
    data[place] ^= 1
    with self.assertRaises(protocol.ProtocolError):
      protocol.DataHeader.unpack(data)


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
