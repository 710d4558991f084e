import doctest

from absl.testing import absltest

from tf_strategies import launch


class DocumentationTest(absltest.TestCase):
  def test_examples_run(self):
    result = doctest.testmod(launch)
    self.assertEqual(result.failed, 0)
    self.assertGreater(result.attempted, 0)


if __name__ == '__main__':
  absltest.main()
