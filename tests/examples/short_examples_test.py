"""The short examples and the notebook run as a user starts them."""

import importlib.util
import json
import os
import re
import sys

import numpy as np
from absl.testing import absltest

from benchmarks import processes
from examples import recommender
from tests.architecture import project
from tests.examples import programs


class ShortExamplesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._working_directory = self.create_tempdir().full_path

  def _run(self, name, *arguments, launcher=()):
    """Returns the output of an example."""
    done = programs.run(
      name, *arguments, launcher=launcher, cwd=self._working_directory
    )
    self.assertEqual(done.returncode, 0, done.stderr[-5000:])
    return done.stdout

  def test_fit_on_several_devices(self):
    [accuracy] = re.findall(
      '4 replicas: accuracy (.*)', self._run('fit_devices')
    )
    self.assertGreater(float(accuracy), 0.95)

  def test_loop_on_two_workers_equals_one_worker(self):
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


_PATH = 'examples/tutorial.ipynb'
# Runs in its own process, because a kernel starts processes and threads.
_EXECUTE = """
import sys
import jupyter_client, nbclient, nbformat
spec = jupyter_client.kernelspec.KernelSpec(
  argv=[sys.executable, '-m', 'ipykernel_launcher', '-f', '{connection_file}'],
  language='python', display_name='Python')
class Manager(jupyter_client.AsyncKernelManager):
  kernel_spec = spec
notebook = nbformat.read(sys.argv[1], as_version=4)
client = nbclient.NotebookClient(
  notebook, timeout=300, kernel_manager_class=Manager, resources={})
client.execute()
for cell in notebook.cells:
  for output in cell.get('outputs', ()):
    print(output.get('text', output.get('ename', '')), end='')
"""


# Parts of the printed output, and of the outputs stored in the notebook.
_OUTPUTS = (
  '[worker 0] accuracy 0.',
  '[worker 1] accuracy 0.',
  'largest difference of a weight: ',
  'worker 1 failed first: exit status 1',
  '  a bug in one worker',
)


class TutorialTest(absltest.TestCase):
  def test_notebook_runs(self):
    for module in ('nbclient', 'ipykernel', 'sklearn'):
      if importlib.util.find_spec(module) is None:
        self.skipTest(f"no {module}: pip install '.[notebook,examples]'")
    path = project.root() / _PATH
    done = processes.run(
      [sys.executable, '-c', _EXECUTE, str(path)],
      env=processes.python_environment(without=['TFS_SECRET']),
      cwd=self.create_tempdir().full_path,
      deadline_seconds=300,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    for words in _OUTPUTS:
      self.assertIn(words, done.stdout)

  def test_notebook_contains_its_outputs(self):
    notebook = json.loads((project.root() / _PATH).read_text(encoding='utf-8'))
    outputs = [o for c in notebook['cells'] for o in c.get('outputs', ())]
    shown = ''.join(line for each in outputs for line in each['text'])
    for words in _OUTPUTS:
      self.assertIn(words, shown)
    self.assertNotIn('File "/', shown)  # No paths of the machine that ran it.


if __name__ == '__main__':
  absltest.main()
