"""The command lines of the examples: defaults, help and errors."""

import json
import pathlib
import re

from absl import flags
from absl.testing import absltest, parameterized

from benchmarks import processes
from examples import common
from tests import tf_case, tiers, virtual_devices
from tests.examples import pages, programs

virtual_devices.configure()


# Takes half a second on an idle machine.
_HELP_SECONDS = 30


class HelpTest(parameterized.TestCase):
  @parameterized.parameters(*zip(pages.NAMES, [True, False], strict=True))
  def test_help_shows_all_flags_quickly(self, name, as_file):
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
  def test_invalid_flag_prints_a_message_without_traceback(self):
    done = programs.run('mnist_keras_fit', '--data_path=missing.npz')
    self.assertEqual(done.returncode, 1)
    output = done.stdout + done.stderr
    self.assertIn('DataError: data_path=missing.npz: no such file', output)
    for line in ('Traceback', 'oneDNN'):
      self.assertNotIn(line, output)


class DocumentationTest(tf_case.TestCase):
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
  def test_documented_launch_commands_parse(self, name):
    (first, arguments), *jobs = self._commands(name)
    self.assertEqual(first, '')
    with pages.parsed(name, *arguments) as example:
      self.assertStartsWith(
        example.__doc__.partition('\n\n')[2], f'  python examples/{name}.py'
      )
      self.assertEqual(flags.FLAGS.strategy, 'ring_mirrored')
      self.assertEqual(flags.FLAGS.dataset, 'digits')
      self.assertEqual(flags.FLAGS.num_virtual_devices, 4)
    self.assertNotEmpty(jobs)
    for launcher, arguments in jobs:
      self.assertIn('--num_workers=2', launcher)
      with pages.parsed(name, *arguments):
        self.assertEqual(flags.FLAGS.dataset, 'digits')
        servers = flags.FLAGS.strategy == 'parameter_server'
        self.assertEqual('--num_ps=2 --chief' in launcher, servers)


_JOB = ('--num_workers=2', '--num_ps=2', '--chief')
# 1,437 digits in batches of 64.
_STEPS_PER_EPOCH = 23


class JobTest(tf_case.TestCase):
  @tiers.parameters(
    ('parameter_server', _JOB, 40),
    tiers.soak('multi_worker_ring', ('--num_workers=2',), 20),
  )
  def test_output_is_short_and_complete(self, strategy, job, most):
    report = self.path('report.json')
    done = programs.run(
      'mnist_keras_fit',
      *('--dataset=digits', '--epochs=1', f'--strategy={strategy}'),
      f'--report_json={report}',
      launcher=job,
    )
    output = done.stdout + done.stderr
    self.assertEqual(done.returncode, 0, output[-5000:])
    with open(report, encoding='utf-8') as f:
      self.assertEqual(json.load(f)['iterations'], _STEPS_PER_EPOCH)
    for words in ('on digits with', 's/step', 'test accuracy'):
      self.assertIn(words, output)
    for words in (
      'default session config',
      'TF_CONFIG will be ignored',
      'oneDNN custom operations',
      'InitializeLog',
    ):
      self.assertNotIn(words, output)
    # The time that tasks wait for each other depends on the machine.
    lines = [t for t in output.splitlines() if 'Waiting to be' not in t]
    self.assertLess(len(lines), most)


if __name__ == '__main__':
  absltest.main()
