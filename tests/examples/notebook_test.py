"""The notebook runs as its reader would run it, including its workers."""

import importlib.util
import json
import sys

from absl.testing import absltest

from benchmarks import processes
from tests.architecture import project

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


# Parts of what it prints, also of the outputs that it contains.
_OUTPUTS = (
  '[worker 0] accuracy 0.',
  '[worker 1] accuracy 0.',
  'largest difference of a weight: ',
  'worker 1 failed first: exit status 1',
  "caused by ValueError('a bug in one worker')",
)


class TutorialTest(absltest.TestCase):
  def test_it_runs_from_top_to_bottom(self):
    for module in ('nbclient', 'ipykernel', 'cloudpickle', 'sklearn'):
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

  def test_it_contains_its_outputs(self):
    notebook = json.loads((project.root() / _PATH).read_text(encoding='utf-8'))
    outputs = [o for c in notebook['cells'] for o in c.get('outputs', ())]
    shown = ''.join(line for each in outputs for line in each['text'])
    for words in _OUTPUTS:
      self.assertIn(words, shown)
    self.assertNotIn('File "/', shown)  # No paths of the machine that ran it.


if __name__ == '__main__':
  absltest.main()
