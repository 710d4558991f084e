"""A peer with any wrong result is not timed."""

from absl.testing import absltest, parameterized

from benchmarks.process_peers import base


class Pretender(base.Peer):
  """A peer that returns its input."""

  def prepare(self):
    pass

  def barrier(self):
    pass

  def release(self):
    pass

  def call(self):
    return None

  def result(self, returned):
    return returned


def make_peer():
  addresses = tuple(f'127.0.0.1:{i + 1}' for i in range(4))
  peer = Pretender(base.Seat(1, addresses, 'lo', 1.0))
  peer.num_bytes = 40_000
  return peer


class CheckTest(parameterized.TestCase):
  def test_right(self):
    self.assertIsNone(make_peer().check(base.expected_sum(4, 10_000)))

  @parameterized.parameters(0, 9999)
  def test_one_wrong_place(self, place):
    found = base.expected_sum(4, 10_000)
    found[place] += 1
    with self.assertRaisesRegex(RuntimeError, 'Pretender: rank 1 of 4'):
      make_peer().check(found)


if __name__ == '__main__':
  absltest.main()
