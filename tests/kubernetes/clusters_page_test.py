"""The manifests of examples/CLUSTERS.md are generated, and its YAML is valid."""

import contextlib
import importlib.util
import io
import re
import shlex

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests.architecture import project
from tf_strategies import cluster, kubernetes, launch
from tf_strategies.cluster import sources

_PAGE = 'examples/CLUSTERS.md'
_FENCE = re.compile(r'^```(\w+)\n(.*?)^```', re.MULTILINE | re.DOTALL)
_needs_yaml = pytest.mark.skipif(
  importlib.util.find_spec('yaml') is None, reason='PyYAML is missing'
)


def _blocks(language):
  text = project.text_files()[_PAGE]
  return [body for found, body in _FENCE.findall(text) if found == language]


def _commands(*program):
  """Returns the arguments of each such command on the page."""
  found = []
  for block in _blocks('bash'):
    for line in block.replace('\\\n', ' ').splitlines():
      words = shlex.split(line.partition(' > ')[0], comments=True)
      if words[: len(program)] == [*program]:
        found.append(words[len(program) :])
  return found


class ClustersPageTest(parameterized.TestCase):
  @parameterized.parameters(
    ('python -m tf_strategies.kubernetes', kubernetes.main, [], 'kind: JobSet'),
    ('tfs launch', launch.main, ['--dry_run'], '[worker 1] '),
  )
  @_needs_yaml
  @pytest.mark.smoke
  def test_documented_commands_succeed(self, program, main, flags, words):
    commands = _commands(*program.split())
    self.assertLen(commands, 2)
    for arguments in commands:
      out = io.StringIO()
      with contextlib.redirect_stdout(out):
        self.assertEqual(main([program, *flags, *arguments]), 0)
      self.assertIn(words, out.getvalue())

  def test_scripts_have_valid_syntax(self):
    blocks = _blocks('bash')
    self.assertNotEmpty(blocks)
    for block in blocks:
      done = processes.run(['bash', '-n', '-c', block])
      self.assertEqual((done.returncode, done.stderr), (0, ''), block)

  @_needs_yaml
  def test_pods_of_the_indexed_job_form_a_cluster(self):
    import yaml

    (block,) = (b for b in _blocks('yaml') if 'completionMode: Indexed' in b)
    service, job = yaml.safe_load_all(block)
    self.assertEqual(service['spec']['clusterIP'], 'None')
    name = job['metadata']['name']
    self.assertEqual(service['spec']['selector'], {'job-name': name})
    pod = job['spec']['template']['spec']
    self.assertIs(pod['enableServiceLinks'], False)
    self.assertEqual(pod['subdomain'], service['metadata']['name'])
    (container,) = pod['containers']
    environ = {
      entry['name']: entry['value']
      for entry in container['env']
      if 'value' in entry
    }
    for index in range(job['spec']['completions']):
      pod_index = {'JOB_COMPLETION_INDEX': str(index)}
      config = cluster.ClusterConfig.from_env({**environ, **pod_index})
      self.assertLen(config.training_tasks, job['spec']['completions'])
      self.assertEqual(
        config.address, f'{name}-{index}.{pod["subdomain"]}:2222'
      )

  def test_every_variable_is_documented(self):
    text = project.text_files()[_PAGE]
    for variable in sources.VARIABLES:
      self.assertIn(f'`{variable}`', text)


if __name__ == '__main__':
  absltest.main()
