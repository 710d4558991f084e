"""Tables that no process holds completely: made, saved, restored, partly lost."""

import os
import pathlib
import threading

import pytest
import tensorflow as tf

from tests import parameter_servers, tiers
from tests.integration import parameter_server_case
from tests.integration import parameter_server_tables as tables

_MB = 1 << 20
_ROWS, _WIDTH = 40_000, 64
# With this many rows, a table and its two slots take 768 MB.
_LARGE_ROWS = int(os.environ.get('TFS_TABLE_ROWS', '1000000'))
_MOST = 64 * _MB


class SavedTablesTest(parameter_server_case.FaultsTestCase):
  def options(self, num_ps, **options):
    return {
      'checkpoint_dir': self.checkpoints,
      'variable_partitioner': _Partitioner(num_ps),
      **options,
    }

  def test_saved_on_two_servers_and_loaded_on_others(self):
    with parameter_servers.Job(num_workers=1, num_ps=2) as job:
      path = job.run(tables.save, (_ROWS, _WIDTH, self.options(2)))
    files = os.listdir(path)
    self.assertNotEmpty([f for f in files if f.startswith('t')])
    # The coordinator has written small arrays only.
    self.assertLess(os.path.getsize(os.path.join(path, 'arrays.bin')), 100_000)
    right = {'table': 0, 'momentum': 0, 'velocity': 0}
    with parameter_servers.Job(num_workers=1, num_ps=3) as job:
      wrong, parts = job.run(tables.load, (_ROWS, _WIDTH, self.options(3)))
      self.assertEqual((wrong, parts), (right, 3))
      one = job.run(
        tables.load_on_one_device, (_ROWS, _WIDTH, self.checkpoints)
      )
      self.assertEqual(one, right)

  @pytest.mark.soak
  def test_loaded_on_one_server(self):
    with parameter_servers.Job(num_workers=1, num_ps=2) as job:
      job.run(tables.save, (_ROWS, _WIDTH, self.options(2)))
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      wrong, parts = job.run(tables.load, (_ROWS, _WIDTH, self.options(1)))
    self.assertEqual((sum(wrong.values()), len(wrong), parts), (0, 3, 1))

  @tiers.parameters('save', tiers.soak('restore'))
  def test_server_that_dies(self, when):
    """Checks that the rows of all servers come from the checkpoint."""
    with parameter_servers.Job(num_workers=1, num_ps=2) as job:
      job.start_chief(
        tables.interrupted, (self.progress, self.checkpoints, when)
      )
      for phase in (1,) if when == 'save' else (1, 2):
        self.wait_for_batch(job, phase)
        job.restart('ps', 1)
        pathlib.Path(f'{self.progress}.{phase}').touch()
      found = self.finish(job)
    self.assertEqual(found['servers'], [0, 1])
    self.assertEqual(found['here'], [0.0, 0.0])
    self.assertEqual(found['saved'], [0.0, 0.0])
    self.assertEqual(found['recovered'], [1])

  @pytest.mark.soak
  def test_coordinator_that_dies_while_servers_save(self):
    """Checks that the unfinished files are not a checkpoint."""
    with parameter_servers.Job(num_workers=1, num_ps=2) as job:
      job.start_chief(
        tables.interrupted, (self.progress, self.checkpoints, 'save')
      )
      self.wait_for_batch(job, 1)
      job.kill('chief', 0)
      (whole,) = self.kept()
      options = self.options(2, optimizer='sgd')
      wrong, parts = job.run(tables.load, (_ROWS, _WIDTH, options))
    self.assertEqual((wrong, parts), ({'table': 0}, 2))
    self.assertEqual(self.kept(), [whole])

  @tiers.parameters(tiers.soak(True), tiers.soak(False))
  def test_memory_of_a_large_table(self, shares_directory):
    """Checks that no task grows by a whole table. Adam has three of 256 MB."""
    options = {'checkpoint_dir': self.checkpoints}
    with parameter_servers.Job(num_workers=1, num_ps=2, deadline=600) as job:
      if not shares_directory:
        options['blind'] = True
      job.start_chief(
        tables.grow, (_LARGE_ROWS, _WIDTH, self.progress, options)
      )
      self.wait_for_batch(job, 1)
      pids = {t: job.pid(*t) for t in (('ps', 0), ('ps', 1), ('worker', 0))}
      seen = {task: [] for task in pids}
      is_over = threading.Event()

      def watch():
        while not is_over.wait(0.05):
          phase = self.batches()
          for task, pid in pids.items():
            seen[task].append((phase, tables.memory(pid)))

      thread = threading.Thread(target=watch)
      thread.start()
      try:
        found = self.finish(job)
      finally:
        is_over.set()
        thread.join()
    for task, sizes in seen.items():
      by_phase = [[s for p, s in sizes if p == n] for n in range(1, 7)]
      peaks = [max(found) for found in by_phase if found]
      text = ' '.join(f'{p / _MB:.0f}' for p in (by_phase[0][0], *peaks))
      print(*task, text, 'MB: before, and at most in each phase')
      # Additional memory while tables are saved.
      for phase in by_phase[1:3]:
        self.assertLess(max(phase, default=0) - by_phase[1][0], 2 * _MOST)
    print({k: v // _MB if v > _MB else v for k, v in found.items()})
    self.assertEqual(found['wrong rows'], 0)
    self.assertGreater(found['distinct rows'], 900)
    self.assertEqual(found['parts'], 2)
    for name in 'make', 'save', 'save again', 'restore':
      self.assertLess(found[name], _MOST, name)
    worker = [size for _, size in seen['worker', 0]]
    self.assertLess(max(worker) - worker[0], _MOST)


class _Partitioner:
  """Cuts tables into `parts`. It can be sent to another process."""

  def __init__(self, parts):
    self._parts = parts

  def __call__(self, shape, dtype):
    is_large = shape[0] > 1000 and len(shape) > 1
    return [self._parts if is_large else 1] + [1] * (len(shape) - 1)


if __name__ == '__main__':
  tf.test.main()
