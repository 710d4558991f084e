"""A peer that cannot run here is skipped with a reason."""

from absl.testing import absltest

from benchmarks.process_peers import catalogue

BY_NAME = {entry.name: entry for entry in catalogue.ENTRIES}


class CatalogueTest(absltest.TestCase):
  def test_what_shares_no_process(self):
    pools = {name: BY_NAME[name].pool for name in BY_NAME}
    for names in (
      ['mwms_ring'],
      ['gloo'],
      ['ours_mpi', 'mpich'],  # The same `mpiexec` starts both.
    ):
      pool = pools[names[0]]
      self.assertEqual([n for n in pools if pools[n] == pool], names)

  def test_no_torch(self):
    for python in ('/no/such/python', 'false'):
      reason = catalogue.why_not(BY_NAME['gloo'], python, False)
      self.assertIn('--torch_python', reason)


if __name__ == '__main__':
  absltest.main()
