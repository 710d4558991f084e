"""Each program says how to run it."""

import re

import tensorflow as tf
from absl import flags
from absl.testing import parameterized

from tests import virtual_devices
from tests.examples import pages

virtual_devices.configure()


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  def _commands(self, name):
    """Yields the page's commands, as launcher flags (if any) and program flags."""
    with pages.parsed(name) as example:
      text = example.__doc__.replace('\\\n', ' ')
    for command in re.findall(r'^  ((?:tfs|python) .*)$', text, re.M):
      launcher, _, program = command.rpartition(' -- ')
      python, path, *arguments = program.split()
      self.assertEqual([python, path], ['python', f'examples/{name}.py'])
      yield launcher, arguments

  @parameterized.parameters(*pages.NAMES)
  def test_page_begins_with_its_launch_command(self, name):
    (launcher, arguments), *others = self._commands(name)
    self.assertEqual(launcher, '')
    self.assertNotEmpty(others)
    with pages.parsed(name, *arguments) as example:
      self.assertStartsWith(
        example.__doc__.partition('\n\n')[2], f'  python examples/{name}.py'
      )
      self.assertEqual(flags.FLAGS.strategy, 'ring_mirrored')
      self.assertEqual(flags.FLAGS.dataset, 'digits')
      self.assertEqual(flags.FLAGS.num_virtual_devices, 4)

  @parameterized.parameters(*pages.NAMES)
  def test_launch_commands_of_jobs_parse(self, name):
    jobs = list(self._commands(name))[1:]
    self.assertNotEmpty(jobs)
    for launcher, arguments in jobs:
      self.assertIn('--num_workers=2', launcher)
      with pages.parsed(name, *arguments):
        self.assertEqual(flags.FLAGS.dataset, 'digits')
        servers = flags.FLAGS.strategy == 'parameter_server'
        self.assertEqual('--num_ps=2 --chief' in launcher, servers)


if __name__ == '__main__':
  tf.test.main()
