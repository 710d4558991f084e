from absl.testing import absltest, parameterized

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


if __name__ == '__main__':
  absltest.main()
