import struct

from absl.testing import absltest, parameterized

from tf_strategies.process_group.network import protocol

_VERSION = protocol.PROTOCOL_VERSION


class FrameTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('magic', b'HTTP', _VERSION, 17, 0),
    ('version', b'TFSC', _VERSION + 1, 17, 0),
    ('kind', b'TFSC', _VERSION, 99, 0),
    ('payload', b'TFSC', _VERSION, 17, 101),
  )
  def test_header_is_refused_before_anything_is_allocated(self, *fields):
    with self.assertRaises(protocol.ProtocolError):
      protocol.unpack_header(struct.pack('!4sBBI', *fields), 100)

  def test_deep_json_is_no_message(self):
    with self.assertRaises(protocol.ProtocolError):
      protocol.unpack(protocol.Kind.HELLO, b'[' * 500_000)


if __name__ == '__main__':
  absltest.main()
