"""The same command works wherever its tasks are started."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from examples import compare_weights
from tests.examples import programs
from tf_strategies.launch import ports as ports_lib

_FLAGS = (
  '--strategy=multi_worker_ring',
  '--dataset=digits',
  '--epochs=1',
  '--steps_per_epoch=10',
)
# The operator and its Secret give this value to each task.
_SECRET = '0123456789abcdef0123456789abcdef'


@pytest.mark.soak
class SameCommandTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self._directory = self.create_tempdir().full_path

  def _start(self, name, **options):
    program = programs.Program(
      'mnist_keras_fit',
      *_FLAGS,
      f'--save_weights={self._directory}/weights-{{rank}}.npz',
      output=os.path.join(self._directory, name),
      **options,
    )
    self.addCleanup(program.kill)
    return program

  def _weights(self, num_workers):
    """Returns the weights, after checking that all workers have the same bits."""
    found = []
    for rank in range(num_workers):
      path = os.path.join(self._directory, f'weights-{rank}.npz')
      found.append(compare_weights.read(path))
      os.remove(path)
    self.assertNotEmpty(found[0])
    for weights in found[1:]:
      self.assertSameElements(weights, found[0])
      for name, value in weights.items():
        np.testing.assert_array_equal(value, found[0][name], name)
    return found[0]

  def _launched(self, num_workers):
    program = self._start(
      f'launched-{num_workers}', launcher=[f'--num_workers={num_workers}']
    )
    self.assertEqual(program.wait(), 0, program.output())
    self.assertIn(f'between {num_workers} workers', program.output())
    return self._weights(num_workers)

  def _as_tfjob(self):
    """Runs a chief and a worker with the variables that Kubeflow's operator sets."""
    chief, worker = ports_lib.pick_ports(2)
    cluster = {
      'chief': [f'localhost:{chief}'],
      'worker': [f'localhost:{worker}'],
    }
    started = []
    for task_type in cluster:
      config = {
        'cluster': cluster,
        'task': {'type': task_type, 'index': 0},
        'environment': 'cloud',
      }
      environment = {'TF_CONFIG': json.dumps(config), 'TFS_SECRET': _SECRET}
      started.append(self._start(task_type, environment=environment))
    for program in started:
      self.assertEqual(program.wait(), 0, program.output())
    self.assertIn('between 2 workers', started[0].output())
    self.assertNotIn('test  loss', started[1].output())
    return self._weights(2)

  def test_launcher_and_tfjob(self):
    alone, launched = self._launched(1), self._launched(2)
    largest, name = compare_weights.largest_difference(alone, launched)
    self.assertLessEqual(largest, 1e-6, name)
    tfjob = self._as_tfjob()
    self.assertSameElements(tfjob, launched)
    for variable, value in tfjob.items():
      np.testing.assert_array_equal(value, launched[variable], variable)


if __name__ == '__main__':
  tf.test.main()
