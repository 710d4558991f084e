"""The memory of a parameter server job does not grow with steps or by a whole table."""

import contextlib
import os
import threading

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers
from tests.integration import parameter_server_case
from tests.integration import parameter_server_programs as programs

_STEPS = int(os.environ.get('TFS_STEPS', '10000'))
# In bytes per step. A kernel that TensorFlow never frees takes 3,000.
_MOST_OF_STEP = 500
# With this many rows, a table and its two slots take 768 MB.
_ROWS = int(os.environ.get('TFS_TABLE_ROWS', '1000000'))
_MOST_OF_TABLES = 64 << 20
_TASKS = ('ps', 0), ('ps', 1), ('worker', 0)

pytestmark = pytest.mark.soak


def _model(rows, **options):
  """Returns a strategy and a model with a table of seeded values."""
  strategy = tfs.ParameterServerStrategy(**options)
  keras.utils.set_random_seed(3)
  with strategy.scope():
    model = keras.Sequential(
      [
        keras.Input([4], dtype='int32'),
        keras.layers.Embedding(rows, 64),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
      ]
    )
    model.compile('adam', 'mse')
    model.optimizer.build(model.trainable_variables)
  strategy.track(model=model, optimizer=model.optimizer)
  return strategy, model


def _memory(pid=None):
  """Returns the bytes of a process in memory, without mapped files."""
  with open(f'/proc/{pid or "self"}/status') as f:
    line = next(line for line in f if line.startswith('RssAnon'))
  return int(line.split()[1]) * 1024


@contextlib.contextmanager
def _watched(sizes):
  """Adds to the list of each process, by id, its memory inside the context."""
  is_over = threading.Event()

  def watch():
    while True:
      for pid, found in sizes.items():
        found.append(_memory(pid))
      if is_over.wait(0.01):
        return

  thread = threading.Thread(target=watch)
  thread.start()
  try:
    yield
  finally:
    is_over.set()
    thread.join()


def _growth(action, pids):
  """Returns by how many bytes each process grows at most during an action."""
  sizes = {pid: [_memory(pid)] for pid in pids}
  with _watched(sizes):
    action()
  return [max(found) - found[0] for found in sizes.values()]


def save_and_restore(directory, pids):
  """Returns the growth of the chief and of other tasks by action, and other numbers."""
  # The first operation on each server allocates memory that does not belong to
  # tables.
  strategy, _ = _model(1000, checkpoint_dir=f'{directory}/first')
  strategy.save()
  strategy.close()
  options, made = {'checkpoint_dir': f'{directory}/second'}, []
  make = _growth(lambda: made.append(_model(_ROWS, **options)), [None])
  [(strategy, model)] = made
  table = model.layers[0].embeddings.value
  sample = tf.range(0, _ROWS, max(1, _ROWS // 1000))
  before = tf.gather(table, sample).numpy()
  found = {'make': make, 'save': _growth(strategy.save, [None, *pids])}
  for part in table.parts:
    part.assign_add(tf.ones(part.shape))
  found['restore'] = _growth(
    lambda: strategy.restore(model=model, optimizer=model.optimizer),
    [None, *pids],
  )
  # Shows that the test detects growth.
  found['read'] = _growth(table.numpy, [None])
  wrong = int((before != tf.gather(table, sample).numpy()).any(1).sum())
  return found, wrong, len(np.unique(before[:, 0])), len(table.parts)


class MemoryTest(parameter_server_case.FaultsTestCase):
  @parameterized.parameters('sync', 'async')
  def test_memory_does_not_grow_with_steps(self, mode):
    tasks = [*_TASKS, ('worker', 1), ('chief', 0)]
    with parameter_servers.Job(deadline=120 + _STEPS / 20) as job:
      arguments = self.progress, _STEPS, mode
      job.start_chief(programs.take_short_steps, arguments)

      def memory(batch):
        self.wait_for_batch(job, batch, seconds=60 + _STEPS / 20)
        return [psutil.Process(job.pid(*t)).memory_info().rss for t in tasks]

      # By this time, one-time allocations have been made.
      first = _STEPS // 5
      seen = [memory(batch) for batch in (first, _STEPS - 100)]
      self.assertEqual(self.finish(job), _STEPS)
    for task, before, after in zip(tasks, *seen, strict=True):
      print(mode, *task, f'{before / 1e6:.1f}, {after / 1e6:.1f} MB')
      grown = (after - before) / (_STEPS - first)
      self.assertLess(grown, _MOST_OF_STEP, task)

  def test_no_task_grows_by_a_large_table(self):
    """Adam has three tables of 256 MB."""
    with parameter_servers.Job(num_workers=1, num_ps=2, deadline=600) as job:
      pids = [job.pid(*task) for task in _TASKS]
      arguments = os.path.dirname(self.checkpoints), pids
      found, wrong, distinct, parts = job.run(save_and_restore, arguments)
    print({k: [size >> 20 for size in v] for k, v in found.items()}, 'MB')
    self.assertEqual((wrong, parts), (0, 2))
    self.assertGreater(distinct, 0.9 * min(_ROWS, 1000))
    for name in ('make', 'save', 'restore'):
      for grown in (found[name][0], found[name][-1]):
        self.assertLess(grown, _MOST_OF_TABLES, name)
    self.assertLess(max(found['save']), 2 * _MOST_OF_TABLES)
    self.assertGreater(found['read'][0], 0.9 * 4 * 64 * _ROWS)


if __name__ == '__main__':
  tf.test.main()
