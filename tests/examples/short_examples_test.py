"""The examples of one page, as a user starts them."""

import os
import re
import sys

import numpy as np
from absl.testing import absltest

from benchmarks import processes
from examples import recommender
from tests.examples import programs

_DIRECTORY = programs.ROOT / 'examples'


class ShortExamplesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._working_directory = self.create_tempdir().full_path

  def _run(self, name, *arguments, launcher=()):
    """Runs an example, in a launcher if it has arguments; returns its output."""
    program = [str(_DIRECTORY / f'{name}.py'), *arguments]
    if launcher:
      launch = ['-m', 'tf_strategies.launch', *launcher, '--', sys.executable]
      program = [*launch, *program]
    done = processes.run_python(
      *program,
      cwd=self._working_directory,
      deadline_seconds=programs.DEADLINE_SECONDS,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-5000:])
    return done.stdout

  def test_fit_on_several_devices(self):
    [accuracy] = re.findall(
      '4 replicas: accuracy (.*)', self._run('fit_devices')
    )
    self.assertGreater(float(accuracy), 0.95)

  def test_loop_on_two_workers_trains_what_one_trains(self):
    alone = re.findall('epoch .*', self._run('custom_loop'))
    together = self._run('custom_loop', launcher=['--num_workers=2'])
    self.assertLen(alone, 10)
    self.assertEqual(re.findall('epoch .*', together), alone)

  def test_fit_on_three_workers(self):
    output = self._run('fit_workers', launcher=['--num_workers=3'])
    found = re.findall(r'\] accuracy (\S+)', output)
    self.assertLen(found, 3)
    self.assertLen({*found}, 1)
    self.assertGreater(float(found[0]), 0.95)

  def test_recommender_resumes_and_recommends(self):
    servers = ['--num_workers=2', '--num_ps=2', '--chief']
    for _ in range(2):
      self._run('recommender', launcher=servers)
    checkpoints = os.path.join(
      self._working_directory, 'recommender/checkpoints'
    )
    self.assertNotEmpty(os.listdir(checkpoints))
    [films] = re.findall(
      r'may like films \[(.*)\]', self._run('recommender', 'serve')
    )
    _, _, tastes = recommender.make_ratings()
    best = np.argsort(-tastes[0][7] @ tastes[1].T)[:10]
    found = {*map(int, films.split())}
    self.assertLen(found, 5)
    # Steps of several workers come in any order.
    self.assertGreaterEqual(len(found & {*best}), 3, f'{found}, {best}')


if __name__ == '__main__':
  absltest.main()
