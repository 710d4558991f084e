"""A peer that cannot run here is skipped with a reason."""

from absl.testing import absltest

from benchmarks.process_peers import catalogue


class CatalogueTest(absltest.TestCase):
  def test_no_torch(self):
    [gloo] = (entry for entry in catalogue.ENTRIES if entry.name == 'gloo')
    for python in ('/no/such/python', 'false'):
      reason = catalogue.why_not(gloo, python, False)
      self.assertIn('--torch_python', reason)


if __name__ == '__main__':
  absltest.main()
