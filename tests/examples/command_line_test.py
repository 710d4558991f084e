"""The command lines of the examples: defaults, help and refusals."""

import pathlib
import re

from absl import flags
from absl.testing import absltest, parameterized

from benchmarks import processes
from examples import common
from tests import virtual_devices
from tests.examples import pages, programs

virtual_devices.configure()


# Takes half a second on an idle machine.
_HELP_SECONDS = 30


class FlagsTest(parameterized.TestCase):
  @parameterized.parameters(('mnist', 3), ('digits', 12))
  def test_default_of_epochs_follows_the_data_set(self, dataset, epochs):
    with pages.parsed('mnist_keras_fit', f'--dataset={dataset}'):
      self.assertEqual(flags.FLAGS.epochs, epochs)


class HelpTest(parameterized.TestCase):
  @parameterized.parameters(*zip(pages.NAMES, [True, False], strict=True))
  def test_help_shows_all_flags_at_once(self, name, as_file):
    program = [f'examples/{name}.py'] if as_file else ['-m', f'examples.{name}']
    shown = processes.run_python(
      *('-X', 'importtime', *program, '--help'),
      cwd=programs.ROOT,
      deadline_seconds=_HELP_SECONDS,
    )
    with pages.parsed(name) as example:
      defined = {
        flag
        for module in (example, common)
        for flag in re.findall(
          r"DEFINE_\w+\(\s*'(\w+)'",
          pathlib.Path(module.__file__).read_text(encoding='utf-8'),
        )
      }
    self.assertGreater(len(defined), 25)
    found = re.findall(r'^  --(?:\[no\])?(\w+):', shown.stdout, re.M)
    self.assertContainsSubset(defined, found)
    # `--help` must not wait for TensorFlow, which takes seconds to load.
    self.assertIn('absl', shown.stderr)
    self.assertNotRegex(shown.stderr, r'\| +(tensorflow|keras)\n')


class ProgramsTest(absltest.TestCase):
  def test_refusal_is_a_message(self):
    program = programs.Program(
      'mnist_keras_fit',
      '--data_path=missing.npz',
      output=self.create_tempfile().full_path,
    )
    self.addCleanup(program.kill)
    self.assertEqual(program.wait(), 1)
    self.assertIn(
      'DataError: data_path=missing.npz: no such file', program.output()
    )
    for line in ('Traceback', 'oneDNN'):
      self.assertNotIn(line, program.output())


if __name__ == '__main__':
  absltest.main()
