"""No task of a parameter server job grows with the number of steps."""

import os

import psutil
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import parameter_servers
from tests.integration import parameter_server_case
from tests.integration import parameter_server_programs as programs

_STEPS = int(os.environ.get('TFS_STEPS', '10000'))
# In bytes per step. A kernel that TensorFlow never frees takes 3,000.
_MOST = 500

pytestmark = pytest.mark.soak


class MemoryTest(parameter_server_case.FaultsTestCase):
  @parameterized.parameters('sync', 'async')
  def test_memory_of_tasks(self, mode):
    tasks = [('ps', 0), ('ps', 1), ('worker', 0), ('worker', 1), ('chief', 0)]
    with parameter_servers.Job(deadline=120 + _STEPS / 20) as job:
      arguments = self.progress, _STEPS, mode
      job.start_chief(programs.take_short_steps, arguments)

      def memory(batch):
        self.wait_for_batch(job, batch, seconds=60 + _STEPS / 20)
        return [psutil.Process(job.pid(*t)).memory_info().rss for t in tasks]

      # By this time, one-time allocations have been made.
      first, half = _STEPS // 5, _STEPS // 2
      seen = [memory(batch) for batch in (first, half, _STEPS - 100)]
      self.assertEqual(self.finish(job), _STEPS)
    for task, *sizes in zip(tasks, *seen, strict=True):
      megabytes = [f'{size / 1e6:.1f}' for size in sizes]
      print(
        mode, *task, *megabytes, f'MB after {first}, {half}, {_STEPS} steps'
      )
      grown = sizes[-1] - sizes[0]
      self.assertLess(grown / (_STEPS - first), _MOST, f'{task}: {megabytes}')


if __name__ == '__main__':
  tf.test.main()
