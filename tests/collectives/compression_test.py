"""Ways to compress gradients by name: what they are, and the bytes that they send."""

from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.collectives import CODECS, compression


class ParseTest(parameterized.TestCase):
  @parameterized.parameters(*CODECS)
  def test_every_codec_is_one(self, name):
    parsed = compression.parse(name)
    self.assertEqual((parsed.name, parsed.codec), (name, name))
    self.assertEqual(parsed.keeps_rest, name == 'int8')

  @parameterized.parameters(
    ('powersgd(4)', 'powersgd', 4, 1.0),
    ('powersgd( 12 )', 'powersgd', 12, 1.0),
    ('topk(0.25)', 'topk', 0, 0.25),
    ('topk(1)', 'topk', 0, 1.0),
    ('topk(1e-3)', 'topk', 0, 0.001),
  )
  def test_arguments(self, text, name, rank, fraction):
    parsed = compression.parse(text)
    self.assertEqual(
      (parsed.name, parsed.rank, parsed.fraction), (name, rank, fraction)
    )
    self.assertEqual((parsed.codec, parsed.keeps_rest), ('none', True))

  @parameterized.parameters(
    ('powersgd', 'powersgd(4)'),
    ('powersgd()', 'powersgd(4)'),
    ('powersgd(0)', 'powersgd(4)'),
    ('powersgd(2.5)', 'powersgd(4)'),
    ('PowerSGD(4)', 'powersgd(4)'),
    ('power_sgd(4)', 'powersgd(4)'),
    ('topk(0)', 'topk(0.01)'),
    ('topk(1.5)', 'topk(0.01)'),
    ('topk(nan)', 'topk(0.01)'),
    ('top-k(0.1)', 'topk(0.01)'),
    ('int8(4)', 'int8'),
    ('Int8', 'int8'),
    ('bfloat', 'bfloat16'),
    ('zip', 'none'),
    ('', 'none'),
    (None, 'none'),
    (8, 'none'),
    (['int8'], 'none'),
  )
  def test_what_is_none_is_refused_with_what_may_be_meant(self, text, meant):
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      compression.parse(text)
    message = str(caught.exception)
    self.assertStartsWith(message, f'compression={text!r} is not supported')
    self.assertIn("'int8', 'none', 'powersgd(RANK)', 'topk(FRACTION)'", message)
    self.assertEndsWith(message, f'Fix: write compression={meant!r}.')


class BytesTest(parameterized.TestCase):
  @parameterized.parameters(2, 3, 5)
  def test_formulas(self, n):
    shape = (n * 512, 256 * 7)
    length, rows, columns = 512 * 256 * 7 * n, *shape
    # In an all-reduce each byte is sent 2 (N - 1) / N times by each rank.
    share = 2 * (n - 1) / n
    for text, want in (
      ('none', 4 * length * share),
      ('bfloat16', 2 * length * share),
      ('int8', (1 + 4 / 256) * length * share),
      ('topk(0.01)', 8 * -(-length // 100) * (n - 1)),
    ):
      parsed = compression.parse(text)
      self.assertAlmostEqual(parsed.bytes_sent(shape, n), want, -2, text)
    # Columns may not be a multiple of ranks, of which the first has most.
    sent = compression.parse('powersgd(4)').bytes_sent(shape, n)
    self.assertBetween(
      sent - 4 * 4 * (rows + columns) * share, 0, 2 * 4 * n * 2
    )

  def test_int8_is_at_most_27_hundredths(self):
    sent = [
      compression.parse(text).bytes_sent((784, 512), 2)
      for text in ('int8', 'none')
    ]
    self.assertLessEqual(sent[0], 0.27 * sent[1])

  @parameterized.parameters(
    ((100, 100), True),
    ((3, 3, 16, 64), True),  # A matrix of 144 x 64.
    ((100,), False),
    ((), False),
    ((1, 1000), False),
    ((16, 16), True),  # 4 * 32 values are half of 256.
    ((15, 16), False),
  )
  def test_matrices_that_become_half_as_long(self, shape, applies):
    power = compression.parse('powersgd(4)')
    self.assertEqual(power.applies(shape), applies)
    if not applies:
      whole = compression.parse('none').bytes_sent(shape, 3)
      self.assertEqual(power.bytes_sent(shape, 3), whole)
    for text in ('int8', 'topk(0.5)'):
      self.assertTrue(compression.parse(text).applies(shape))
    self.assertFalse(compression.parse('none').applies(shape))

  @parameterized.parameters((1, 1), (99, 1), (101, 2), (200, 2), (0, 0))
  def test_one_value_at_least(self, length, count):
    self.assertEqual(compression.parse('topk(0.01)').count(length), count)


if __name__ == '__main__':
  absltest.main()
