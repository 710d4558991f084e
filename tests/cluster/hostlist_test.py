import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies import errors
from tf_strategies.cluster import checks
from tf_strategies.cluster.sources import hostlist


class HostsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('n[3,1]', ['n3', 'n1']),
    ('n[08-11]', ['n08', 'n09', 'n10', 'n11']),
    ('n[001-002,7],gpu1', ['n001', 'n002', 'n7', 'gpu1']),
    ('r[1-2]n[1-2]', ['r1n1', 'r1n2', 'r2n1', 'r2n2']),
    ('n[1-2].cluster.local', ['n1.cluster.local', 'n2.cluster.local']),
  )
  def test_expands_as_slurm_does(self, text, expected):
    self.assertEqual(hostlist.hosts(text), expected)

  @parameterized.parameters(
    '', 'a,,b', 'a b', 'a[', 'a]', 'a[1-]', 'a[2-1]', 'a[x]', 'a[[1]]', 'a/b',
    'a[\u0661]', 'a[0-99999999]', 'a[1-1000][1-1000]', 'a[1-99999],b[1-2]',
    'a' * 300,
  )  # fmt: skip
  def test_anything_else_is_refused(self, text):
    with self.assertRaises(errors.ClusterConfigError) as caught:
      hostlist.hosts(text)
    self.assertLess(len(str(caught.exception)), 700)

  def test_most_hosts_there_may_be(self):
    self.assertLen(hostlist.hosts('a[1-99999],b'), checks.MAX_TASKS)

  @parameterized.parameters(
    '[1-9]' * 20_000, 'a[' * 50_000, 'a' * 100_000 + '[1-99999]'
  )
  def test_as_much_as_a_variable_holds_is_refused_soon(self, text):
    # Quadratic work would take minutes, and expanding all of it forever.
    with self.assertRaises(errors.ClusterConfigError):
      hostlist.hosts(text)


class NumbersTest(parameterized.TestCase):
  @parameterized.parameters(
    ('2', [2]), ('2(x3),1', [2, 2, 2, 1]), ('1,2(x2),3', [1, 2, 2, 3])
  )
  def test_expands_as_slurm_does(self, text, expected):
    self.assertEqual(hostlist.numbers(text), expected)

  @parameterized.parameters(
    '', 'x', '1,', '1(x2', '-1', '1(x99999999)', '1(x99999),2(x2)',
  )  # fmt: skip
  def test_anything_else_is_refused(self, text):
    with self.assertRaises(errors.ClusterConfigError):
      hostlist.numbers(text)


_TEXT = st.text() | st.text('an01[]-,(x).', max_size=30)


class FuzzTest(absltest.TestCase):
  @hypothesis.given(_TEXT)
  def test_any_text_is_a_list_or_one_error(self, text):
    for parse in (hostlist.hosts, hostlist.numbers):
      try:
        found = parse(text)
      except errors.ClusterConfigError as e:
        self.assertIn('Fix: ', str(e))
        continue
      self.assertBetween(len(found), 1, checks.MAX_TASKS)


if __name__ == '__main__':
  absltest.main()
