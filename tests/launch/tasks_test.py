import socket
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import processes
from tf_strategies import errors
from tf_strategies.cluster import job as job_lib
from tf_strategies.launch import ports, reaper, tasks

_ALL = job_lib.TaskCounts(num_workers=2, num_ps=1, chief=True, evaluator=True)


def _plan(job, secret='abcd'):
  ports = range(1000, 1000 + sum(job.all_counts.values()))
  node = tasks.HostTasks(tasks.LOOPBACK, job.all_counts, list(ports))
  return tasks.plan_tasks([node], ['run', '--a b'], secret)


class EnvironmentTest(absltest.TestCase):
  def test_variables_of_another_cluster_are_not_inherited(self):
    inherited = {
      'HOME': '/home/me',
      'TF_CONFIG': '{}',
      'SLURM_PROCID': '1',
      'JOB_COMPLETION_INDEX': '1',
      'TFS_NUM_WORKERS': '2',
      'TFS_SECRET': 'other',
      'TFS_SECRET_FILE': 'file',
      'TFS_RESTART_COUNT': '9',
      'PYTHONUNBUFFERED': '',
    }
    spec = _plan(job_lib.TaskCounts())[0]
    found = tasks.full_environment(spec, inherited, 3)
    self.assertEqual(
      found,
      {
        'HOME': '/home/me',
        'TFS_SECRET': 'abcd',
        'TFS_RESTART_COUNT': '3',
        'TF_CPP_MIN_LOG_LEVEL': '1',
        'PYTHONUNBUFFERED': '1',
        'TFS_RUN_ID': spec.environment['TFS_RUN_ID'],
      },
    )

  def test_run_id_is_the_same_for_all_tasks_and_restarts_of_a_launch(
    self,
  ):
    specs = _plan(_ALL)
    found = {
      tasks.full_environment(spec, inherited, count)['TFS_RUN_ID']
      for spec in specs
      for count in range(2)
      for inherited in ({}, {'TFS_RUN_ID': ''})
    }
    self.assertLen(found, 1)
    for job, secret in ((job_lib.TaskCounts(), 'abcd'), (_ALL, 'ef01')):
      found.add(_plan(job, secret)[0].environment['TFS_RUN_ID'])
    self.assertLen(found, 3)
    for named in (
      {'SLURM_JOB_ID': '17'},
      {'SLURM_JOB_ID': '18', 'TFS_RUN_ID': '17'},
    ):
      own = tasks.full_environment(specs[0], named, 0)
      self.assertEqual(own['TFS_RUN_ID'], '17')

  def test_log_level_of_the_user_is_kept(self):
    inherited = {'TF_CPP_MIN_LOG_LEVEL': '0'}
    found = tasks.full_environment(_plan(job_lib.TaskCounts())[0], inherited, 0)
    self.assertEqual(found['TF_CPP_MIN_LOG_LEVEL'], '0')


class DescendantsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({2: 1, 3: 2, 4: 3, 9: 8}, 1, [2, 3, 4]),
    # A pid may be reused while /proc is read. A cycle must not cause an endless loop.
    ({2: 3, 3: 2, 4: 2}, 2, [3, 4]),
  )
  def test_all_descendants_are_found(self, parents, ancestor, expected):
    self.assertEqual(reaper.descendants(parents, ancestor), expected)


class PickPortsTest(absltest.TestCase):
  def test_other_processes_do_not_pick_the_same_ports(self):
    picked = ports.pick_ports(20)
    ask = (
      'from tf_strategies.launch import ports; import sys; '
      'ports._PORTS = [int(p) for p in sys.argv[1:]]; '
      'print(ports.pick_ports(1))'
    )
    found = processes.run_python('-c', ask, *map(str, picked), '32001')
    self.assertEqual(found.stdout.strip(), '[32001]')

  def test_only_the_last_ports_are_held(self):
    """Checks that a process does not run out of file descriptors."""
    for _ in range(10):
      ports.pick_ports(50)
    self.assertLessEqual(len(ports._held), ports._HELD)

  def test_ports_in_use_are_not_picked(self):
    with socket.create_server(('127.0.0.1', 0)) as server:
      port = server.getsockname()[1]
      with (
        mock.patch.object(ports, '_PORTS', [port]),
        self.assertRaisesRegex(errors.RendezvousError, 'Expected 1 .* got 0'),
      ):
        ports.pick_ports(1)


if __name__ == '__main__':
  absltest.main()
