"""Clusters from the environment variables of each scheduler."""

import pytest
from absl.testing import absltest, parameterized

from tests.cluster import schedulers
from tf_strategies.cluster.sources import hostlist


def _slurm(**changes):
  return schedulers.read(schedulers.SLURM, **changes)


class SlurmTest(parameterized.TestCase):
  def test_tasks_of_a_host_have_consecutive_ports(self):
    config = _slurm()
    port = 12_000 + 4242 % 200 * 100
    self.assertEqual(
      list(config.jobs['worker']),
      [f'node00{n}:{port + local}' for n in (1, 2, 3) for local in (0, 1)]
      + [f'gpu1:{port}'],
    )
    self.assertEqual((config.task_type, config.task_index), ('worker', 3))
    self.assertEqual(config.address, f'node002:{port + 1}')

  @pytest.mark.smoke
  def test_all_tasks_read_the_same_cluster(self):
    found = [_slurm(SLURM_PROCID=str(rank)) for rank in range(7)]
    self.assertEqual([c.task_index for c in found], list(range(7)))
    for config in found:
      self.assertEqual(config.jobs, found[0].jobs)

  def test_port_from_variable_or_default(self):
    for changes, address in (
      ({'TFS_PORT': '3000'}, 'node002:3001'),
      ({'SLURM_JOB_ID': None}, 'node002:2223'),
    ):
      self.assertEqual(_slurm(**changes).address, address)

  def test_step_overrides_the_job(self):
    config = _slurm(
      SLURM_STEP_ID='0',
      SLURM_STEP_NUM_TASKS='2',
      SLURM_STEP_NODELIST='node003,gpu1',
      SLURM_STEP_TASKS_PER_NODE='1(x2)',
      SLURM_PROCID='1',
      ENVIRONMENT='BATCH',
    )
    hosts = [a.partition(':')[0] for a in config.jobs['worker']]
    self.assertEqual(hosts, ['node003', 'gpu1'])

  def test_cyclic_distribution_with_one_task_per_host(self):
    # The value that srun sets when --distribution is not passed.
    config = _slurm(
      SLURM_DISTRIBUTION='cyclic',
      SLURM_NTASKS='4',
      SLURM_TASKS_PER_NODE='1(x4)',
    )
    self.assertEqual(config.address, 'gpu1:16200')

  @pytest.mark.smoke
  def test_first_task_is_chief_and_last_tasks_are_ps_and_evaluator(self):
    config = _slurm(TFS_NUM_PS='2', TFS_EVALUATOR='1')
    sizes = {job: len(tasks) for job, tasks in config.jobs.items()}
    self.assertEqual(sizes, {'chief': 1, 'worker': 3, 'ps': 2, 'evaluator': 1})
    self.assertEqual((config.task_type, config.task_index), ('worker', 2))
    self.assertStartsWith(config.jobs['evaluator'][0], 'gpu1:')
    self.assertStartsWith(config.jobs['chief'][0], 'node001:')

  @parameterized.parameters(
    {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'},
    # sbatch gives its script the number of task 0.
    {'ENVIRONMENT': 'BATCH', 'SLURM_PROCID': '0'},
    {'ENVIRONMENT': 'BATCH', 'SLURM_PROCID': '0', 'TFS_NUM_WORKERS': '7'},
  )
  def test_environment_without_a_multi_task_step_is_a_single_process(
    self, **changes
  ):
    self.assertIsNone(_slurm(**changes))


class KubernetesTest(parameterized.TestCase):
  @parameterized.parameters(
    # The number of pods is unknown.
    (schedulers.INDEXED_JOB, {'TFS_NUM_WORKERS': None}),
    (schedulers.INDEXED_JOB, {'TFS_NUM_WORKERS': '1'}),
    (schedulers.JOBSET, {'TFS_NUM_WORKERS': '1', 'TFS_NUM_PS': '0'}),
  )
  def test_one_pod_is_a_single_process(self, environ, changes):
    first = {**changes, 'JOB_COMPLETION_INDEX': '0'}
    self.assertIsNone(schedulers.read(environ, **first))


_TF_CONFIG = (
  '{"cluster": {"worker": ["a:1", "b:1"]}, '
  '"task": {"type": "worker", "index": 0}}'
)


class PrecedenceTest(absltest.TestCase):
  def test_precedence_of_sources(self):
    environ = {}
    for changes, address in (
      (schedulers.SLURM, _slurm().address),
      (schedulers.JOBSET, 'mnist-worker-0-1.mnist:2222'),
      ({'TF_CONFIG': _TF_CONFIG}, 'a:1'),
    ):
      environ |= changes
      if changes is schedulers.JOBSET:
        # Slurm would read TFS_NUM_WORKERS and TFS_NUM_PS too.
        del environ['SLURM_PROCID']
      self.assertEqual(schedulers.read(environ).address, address)
    self.assertIsNone(schedulers.read({**environ, 'TF_CONFIG': '{}'}))


class HostsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('n[3,1]', ['n3', 'n1']),
    ('n[08-11]', ['n08', 'n09', 'n10', 'n11']),
    ('n[001-002,7],gpu1', ['n001', 'n002', 'n7', 'gpu1']),
    ('r[1-2]n[1-2]', ['r1n1', 'r1n2', 'r2n1', 'r2n2']),
    ('n[1-2].cluster.local', ['n1.cluster.local', 'n2.cluster.local']),
  )
  def test_host_list_is_expanded(self, text, expected):
    self.assertEqual(hostlist.hosts(text), expected)


if __name__ == '__main__':
  absltest.main()
