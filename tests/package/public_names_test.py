"""The package's door: what it offers, and what it loads for that."""

from absl.testing import absltest, parameterized

import tf_strategies as tfs
from benchmarks import processes
from tf_strategies import _public

_LIGHT = ('cluster', 'collectives', 'errors', 'process_group')


class PublicNamesTest(parameterized.TestCase):
  def test_every_name_is_there(self):
    for name in tfs.__all__:
      self.assertIsNotNone(getattr(tfs, name), name)
    self.assertContainsSubset(_public.__all__, tfs.__all__)
    self.assertSameElements(dir(tfs), tfs.__all__)

  def test_star_import(self):
    found = {}
    exec('from tf_strategies import *', found)
    self.assertIs(found['RingOptions'], tfs.RingOptions)

  @parameterized.parameters('RingMiroredStrategy', '_private', 'np')
  def test_unknown_name(self, name):
    with self.assertRaisesRegex(AttributeError, name):
      getattr(tfs, name)

  @parameterized.parameters(*_LIGHT)
  def test_room_is_loaded_without_tensorflow(self, room):
    program = (
      f'import sys, tf_strategies as tfs; tfs.{room}; '
      'assert "tensorflow" not in sys.modules and "keras" not in sys.modules'
    )
    done = processes.run_python('-c', program)
    self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == '__main__':
  absltest.main()
