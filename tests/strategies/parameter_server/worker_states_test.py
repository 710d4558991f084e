"""What workers have of their own: kept, moved, lost with them, and restored."""

import types
from unittest import mock

import numpy as np
import tensorflow as tf

from tests import virtual_devices
from tests.strategies.parameter_server import local_servers
from tf_strategies.strategies.parameter_server import (
  worker_function,
  worker_states,
)

virtual_devices.configure()


class WorkerStatesTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())
    self.enter_context(
      mock.patch.object(worker_function, 'COORDINATOR', virtual_devices.name(0))
    )
    self.pool = types.SimpleNamespace(
      workers=(0, 1, 2), deaths=dict.fromkeys(range(3), 0)
    )
    self.states = worker_states.WorkerStates(self.pool)
    self.moment = local_servers.variable(0, [0.0, 0.0])
    self.count = local_servers.variable(0, 0)
    self.variables = [self.moment, self.count]
    for variable in self.variables:
      variable.states = self.states

  def _keep(self, place, worker=None):
    """Place p has [10 p, 10 p + 1], and the count 4 p."""
    values = [
      tf.constant([10.0 * place, 10.0 * place + 1]),
      tf.constant(4 * place),
    ]
    worker = place if worker is None else worker
    life = self.states.life_of(worker)
    self.states.keep(place, worker, life, self.variables, values)

  def _take(self, place, worker):
    values = self.states.take(place, worker, self.variables)
    return [None if v is None else v.numpy().tolist() for v in values]

  def test_new_place_begins_with_what_the_server_has(self):
    self.assertEqual(self._take(1, 1), [None, None])

  def test_place_goes_on_and_moves(self):
    self._keep(0)
    self._keep(2, worker=1)
    self.assertEqual(self._take(0, 0), [[0.0, 1.0], 0])
    self.assertEqual(self._take(2, 1), [[20.0, 21.0], 8])
    self.assertEqual(self._take(2, 2), [[20.0, 21.0], 8])
    self.assertEqual(self.states.lost, 0)

  def test_lost_with_its_worker(self):
    for place in range(3):
      self._keep(place)
    self.pool.deaths[1] += 1
    with self.assertLogs(level='WARNING') as logged:
      # The mean of the others; the second attempt finds the same.
      self.assertEqual(self._take(1, 0), [[10.0, 11.0], 4])
      self.assertEqual(self._take(1, 2), [[10.0, 11.0], 4])
    self.assertIn('the mean of the others', logged.output[0])
    self.assertEqual(self.states.lost, 1)

  def test_nobody_else_has_a_state(self):
    self._keep(1)
    self.pool.deaths[1] += 1
    with self.assertLogs(level='WARNING') as logged:
      self.assertEqual(self._take(1, 1), [None, None])
    self.assertIn('a new one', logged.output[0])

  def test_coordinator_reads_the_mean_and_writes_for_all(self):
    self._keep(1)
    self._keep(2)
    self.assertAllEqual(self.moment, [15.0, 16.0])
    self.assertAllEqual(worker_states.read(self.count), [4, 8])
    self.moment.assign([7.0, 8.0])
    # The place has it from the server, and the rest as before.
    self.assertEqual(self._take(1, 1), [None, 4])
    self.assertAllEqual(self.moment, [7.0, 8.0])

  def test_restores_each_place(self):
    self._keep(0)
    for variable, array in (
      (self.moment, np.array([[1.0, 2], [3, 4], [5, 6]], np.float32)),
      (self.count, np.array([7, 8, 9], np.int32)),
    ):
      self.assertTrue(worker_states.write(variable, array))
    for place in range(3):
      expected = [[2.0 * place + 1, 2.0 * place + 2], place + 7]
      self.assertEqual(self._take(place, place), expected)

  def test_another_number_of_places_gets_the_mean(self):
    array = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    worker_states.write(self.moment, array)
    worker_states.write(self.count, np.array([7, 9], np.int32))
    for place in range(3):
      self.assertEqual(self._take(place, place), [[2.0, 3.0], 8])

  def test_variable_of_no_worker(self):
    variable = local_servers.variable(0, 1.0)
    self.assertIsNone(worker_states.read(variable))
    self.assertFalse(worker_states.write(variable, np.ones([1])))


if __name__ == '__main__':
  tf.test.main()
