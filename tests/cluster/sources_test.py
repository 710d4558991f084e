"""What each scheduler sets, as it sets it."""

import pytest
from absl.testing import absltest, parameterized

from tests.cluster import schedulers
from tf_strategies.cluster.sources import hostlist


def _slurm(**changes):
  return schedulers.read(schedulers.SLURM, **changes)


class SlurmTest(parameterized.TestCase):
  def test_tasks_of_a_host_have_ports_that_follow_each_other(self):
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
  def test_all_tasks_agree(self):
    found = [_slurm(SLURM_PROCID=str(rank)) for rank in range(7)]
    self.assertEqual([c.task_index for c in found], list(range(7)))
    for config in found:
      self.assertEqual(config.jobs, found[0].jobs)

  def test_port_is_chosen(self):
    for changes, address in (
      ({'TFS_PORT': '3000'}, 'node002:3001'),
      ({'SLURM_JOB_ID': None}, 'node002:2223'),
    ):
      found = _slurm(**changes).address
      self.assertEqual(found, address)

  def test_step_comes_before_the_job(self):
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

  def test_one_task_a_host_is_in_order(self):
    # What srun itself says where nobody passes --distribution.
    config = _slurm(
      SLURM_DISTRIBUTION='cyclic',
      SLURM_NTASKS='4',
      SLURM_TASKS_PER_NODE='1(x4)',
    )
    self.assertEqual(config.address, 'gpu1:16200')

  @pytest.mark.smoke
  def test_first_is_the_chief_and_last_are_parameter_servers(self):
    config = _slurm(TFS_NUM_PS='2', TFS_EVALUATOR='1')
    sizes = {job: len(tasks) for job, tasks in config.jobs.items()}
    self.assertEqual(sizes, {'chief': 1, 'worker': 3, 'ps': 2, 'evaluator': 1})
    self.assertEqual((config.task_type, config.task_index), ('worker', 2))
    self.assertStartsWith(config.jobs['evaluator'][0], 'gpu1:')
    self.assertStartsWith(config.jobs['chief'][0], 'node001:')

  @parameterized.parameters(
    {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'},
    # The script that sbatch runs is numbered as task 0 of all.
    {'ENVIRONMENT': 'BATCH', 'SLURM_PROCID': '0'},
    {'ENVIRONMENT': 'BATCH', 'SLURM_PROCID': '0', 'TFS_NUM_WORKERS': '7'},
  )
  def test_no_step_of_several_tasks_is_a_single_process(self, **changes):
    self.assertIsNone(_slurm(**changes))


class KubernetesTest(parameterized.TestCase):
  @parameterized.parameters(
    # Nobody has counted the pods.
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
  def test_first_counts(self):
    environ = {}
    for changes, address in (
      (schedulers.SLURM, _slurm().address),
      (schedulers.JOBSET, 'mnist-worker-0-1.mnist:2222'),
      ({'TF_CONFIG': _TF_CONFIG}, 'a:1'),
    ):
      environ |= changes
      if changes is schedulers.JOBSET:
        # It says how many tasks there are, to Slurm too.
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
  def test_expands_as_slurm_does(self, text, expected):
    self.assertEqual(hostlist.hosts(text), expected)


if __name__ == '__main__':
  absltest.main()
