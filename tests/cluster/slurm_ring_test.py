"""Two processes, started as `srun` starts tasks, form a ring and all-reduce."""

import os
import sys

import pytest
from absl.testing import absltest

from benchmarks import processes
from tests.cluster import schedulers
from tests.launch import programs
from tf_strategies.launch import ports as ports_lib

_DEADLINE_SECONDS = 120.0


class SlurmRingTest(absltest.TestCase):
  def _start(self, rank, port):
    variables = {
      'SLURM_STEP_ID': '0',
      'SLURM_NTASKS': '2',
      'SLURM_STEP_NODELIST': 'localhost',
      'SLURM_STEP_TASKS_PER_NODE': '2',
      'SLURM_NODEID': '0',
      'SLURM_PROCID': str(rank),
      'SLURM_LOCALID': str(rank),
      'TFS_PORT': str(port),
      'TFS_SECRET': 'ab' * 32,
    }
    kept = processes.python_environment(without=['TFS_SECRET_FILE'])
    command = processes.Command(
      [sys.executable, '-c', programs.SUM],
      name=f'task {rank}',
      error_log=os.path.join(self.create_tempdir(), 'errors'),
      env=schedulers.changed(kept, **variables),
      deadline_seconds=_DEADLINE_SECONDS,
    )
    return self.enter_context(command)

  @pytest.mark.smoke
  def test_tasks_of_one_step_form_a_ring(self):
    port = _free_pair()
    for task in [self._start(rank, port) for rank in range(2)]:
      if task.wait():
        task.fail('failed')
      self.assertEqual(task.output(), 'the sum is [1000.0, 1002.0, 1004.0]\n')


def _free_pair() -> int:
  """Returns a free port whose next port is free too."""
  ports = set(ports_lib.pick_ports(500))
  return next(port for port in ports if port + 1 in ports)


if __name__ == '__main__':
  absltest.main()
