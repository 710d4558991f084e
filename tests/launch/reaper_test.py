"""The reaper alone, as the launcher starts it."""

from absl.testing import absltest, parameterized

from tf_strategies.launch import reaper


class DescendantsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({2: 1, 3: 2, 4: 3, 9: 8}, 1, [2, 3, 4]),
    # A pid may be used again while /proc is read: no cycle may trap it.
    ({2: 3, 3: 2, 4: 2}, 2, [3, 4]),
  )
  def test_finds_all_below(self, parents, ancestor, expected):
    self.assertEqual(reaper.descendants(parents, ancestor), expected)


if __name__ == '__main__':
  absltest.main()
