"""docs/spark.md on a local Spark cluster: two workers, then a killed executor."""

import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import sys

import psutil
from absl.testing import absltest

from benchmarks import processes
from tests import weights
from tests.architecture import documents, project
from tests.integration import pages
from tf_strategies.checkpoint import checkpointer

_PAGE = 'docs/spark.md'
# Executors are separate processes. Master and workers run in the driver.
_MASTER = '--master=local-cluster[2,1,1024]'
_EXECUTOR = 'org.apache.spark.executor.CoarseGrainedExecutorBackend'
_WITHOUT_SPARK = """
import runpy, sys
print(runpy.run_path(sys.argv[2])['train']())
"""
_REPORT = re.compile(
  r'^(?:\[worker \d\] )?(\d\.\d{4}) (\d) from epoch (\d+)$', re.M
)


class SparkTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.program = pages.write(self, _PAGE, 'spark_train.py', ['pyspark'])
    if not (os.environ.get('JAVA_HOME') or shutil.which('java')):
      self.skipTest('no Java: apt-get install openjdk-17-jre-headless')
    self.text = project.text_files()[_PAGE]
    self.home = _spark_home(self.program.parent / 'spark')

  def test_two_workers_give_the_results_of_one(self):
    [(loss, *start)] = self._without_spark('alone', launch=())
    self.assertEqual(start, ['1', '0'])
    found = self._train('both')
    self.assertEqual(found, [(loss, '2', '0')] * 2)
    self.assertEqual(found, _REPORT.findall(self.text))
    self.assertLessEqual(self._difference('alone', 'both'), 1e-6)

  def test_run_resumes_after_a_killed_executor(self):
    complete = self._without_spark('complete', launch=['--num_workers=2'])
    self.assertLen(complete, 2)
    first, second = self._train('resumed', kills=True)
    self.assertEqual(first, second)
    self.assertEqual(first[:2], complete[0][:2])
    epochs = int(re.search(r'epochs=(\d+)', self.program.read_text())[1])
    self.assertBetween(int(first[2]), 1, epochs - 1)
    self.assertEqual(self._difference('complete', 'resumed'), 0)

  def _without_spark(self, directory, launch):
    """Returns the reports of workers that a launcher started."""
    program = self.program.parent / 'without_spark.py'
    program.write_text(_WITHOUT_SPARK, encoding='utf-8')
    text = pages.run(program, directory, self.program.name, launch=launch)
    return _REPORT.findall(text)

  def _difference(self, *directories):
    """Returns the largest difference between the variables that two runs saved last."""
    arrays = [
      checkpointer.Checkpointer(self.program.parent / name).newest().arrays
      for name in directories
    ]
    self.assertNotEmpty(arrays[0])
    return weights.largest_difference(*arrays)[0]

  def _train(self, directory, kills=False):
    """Runs the page's command, and returns each worker's report."""
    here = self.program.parent
    given = {
      'spark-submit': str(self.home / 'bin' / 'spark-submit'),
      '/shared/run': directory,
    }
    [words] = (w for w in documents.commands(self.text) if w[0] in given)
    submit, *words = (given.get(word, word) for word in words)
    [conf] = documents.blocks(self.text, 'properties')
    # The page's setting for clusters other than YARN and Kubernetes.
    secret = f'spark.authenticate.secret {os.urandom(16).hex()}\n'
    (here / conf.title).write_text(conf.body + secret, encoding='utf-8')
    variables = {
      'PYSPARK_PYTHON': sys.executable,
      'SPARK_HOME': str(self.home),
      'SPARK_LOCAL_DIRS': str(self.home / 'local'),
      'SPARK_LOCAL_IP': '127.0.0.1',
    }
    with processes.Command(
      [submit, _MASTER, *words],
      env=processes.python_environment(variables),
      cwd=here,
      error_log=here / f'{directory}.log',
    ) as command:
      if kills:
        saved = checkpointer.Checkpointer(here / directory).paths
        command.wait_until(lambda: bool(saved()))
        _executors(command)[0].kill()
      if command.wait():
        command.fail('failed')
      return _REPORT.findall(command.output())


def _executors(command):
  found = []
  for process in command.descendants():
    with contextlib.suppress(psutil.Error):
      if _EXECUTOR in process.cmdline():
        found.append(process)
  return found


def _spark_home(directory):
  """Copies the installed Spark to a directory where workers may write."""
  spec = importlib.util.find_spec('pyspark')
  directory.mkdir()
  for path in pathlib.Path(spec.origin).parent.iterdir():
    if path.name in ('bin', 'jars', 'python', 'sbin'):
      (directory / path.name).symlink_to(path)
  return directory


if __name__ == '__main__':
  absltest.main()
