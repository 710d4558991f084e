"""Host calls keep their order, wait for all results, and fail with a type."""

import pickle
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tf_strategies import _graph_errors, errors
from tf_strategies.strategies.multi_worker import (
  collective_queue,
)

virtual_devices.configure()


class _RecordingGroup:
  """A fake process group that records its calls and adds `more`."""

  def __init__(self, more=0):
    self.failure = None
    self.record = []
    self._more = more

  def add(self, array, name, seconds=0.0):
    time.sleep(seconds)
    self.record.append(name)
    return array + np.asarray(self._more, array.dtype)


def _lost(rank=3):
  error = errors.WorkerUnavailableError(f'rank {rank} is gone: [brackets] {{}}')
  error.rank = rank
  error.address = 'host:2222'
  return error


def _call(ring, x, name, seconds=0.0):
  return ring.call('kind', lambda g, a: g.add(a, name, seconds), x, x.shape)


def _request(work, tensor):
  return collective_queue.QueuedWork(work, tensor, '')


def _call_all(ring, tensors, name):
  requests = [
    _request(lambda g, a, i=i: g.add(a, f'{name}{i}'), tensor)
    for i, tensor in enumerate(tensors)
  ]
  return ring.call_all('kind_all', requests, virtual_devices.HOST)


def _program(ring):
  """Returns a step whose calls depend on each other only by their order.

  Loops, branches and functions use their own variables. TensorFlow keeps the
  order of host calls among each other, but not relative to operations with
  variables.
  """
  variables = {
    name: tf.Variable(0.0) for name in ('while', 'if', 'inner', 'second')
  }

  def call_with_variable(name, x):
    variables[name].assign_add(1.0)
    return _call(ring, x, name, 0.05)

  @tf.function
  def inner(x):
    return call_with_variable('inner', x)

  def loop(name, turns, x):
    return tf.while_loop(
      lambda i, _: i < turns,
      lambda i, _: (i + 1, call_with_variable(name, x)),
      [tf.constant(0), x],
    )[1]

  @tf.function
  def step(x, flag):
    return [
      loop('while', 3, x),
      *_call_all(ring, [x, x + 1], 'all_'),
      tf.cond(
        flag,
        lambda: call_with_variable('if', x),
        lambda: _call(ring, x, 'else'),
      ),
      _call(ring, x, 'middle'),
      inner(x),
      loop('second', 2, x),
      _call(ring, x, 'last'),
    ]

  return step


_EXPECTED = [
  *('while', 'while', 'while', 'all_0', 'all_1', 'if', 'middle'),
  *('inner', 'second', 'second', 'last'),
]


class OrderTest(tf.test.TestCase):
  @pytest.mark.smoke
  def test_program_order_across_control_flow_and_functions(self):
    group = _RecordingGroup(more=10)
    step = _program(collective_queue.CollectiveQueue(group))
    for _ in range(3):
      group.record.clear()
      results = step(tf.constant([1.0, 2.0]), tf.constant(True))
      self.assertEqual(group.record, _EXPECTED)
      self.assertAllClose(
        results, [[11.0, 12.0]] * 2 + [[12.0, 13.0]] + [[11.0, 12.0]] * 5
      )


class ResultsTest(tf.test.TestCase, parameterized.TestCase):
  def _consume_first(self, work, device):
    """Calls for two tensors; a host function sees the first one's result."""
    group = _RecordingGroup(more=5)
    ring = collective_queue.CollectiveQueue(group)

    @tf.function
    def step():
      requests = [
        _request(lambda g, a, i=i: work(g, i, a), tf.constant([1, 2]))
        for i in range(2)
      ]
      first, _ = ring.call_all('kind', requests, device)
      return tf.numpy_function(
        lambda a: group.add(a, f'saw {a.tolist()}'), [first], tf.int32
      )

    return group, step

  # To another device than the host's each result is copied when it is there.
  @parameterized.parameters(virtual_devices.HOST, virtual_devices.name(1))
  def test_no_result_before_all_are_there(self, device):
    group, step = self._consume_first(
      lambda g, i, a: g.add(a, i, 0.3 * i), device
    )
    self.assertAllEqual(step(), [11, 12])
    self.assertEqual(group.record, [0, 1, 'saw [6, 7]'])

  @parameterized.parameters(virtual_devices.HOST, virtual_devices.name(1))
  def test_no_result_if_one_fails(self, device):
    def work(group, index, array):
      if index == 1:
        raise _lost()
      return group.add(array, index)

    group, step = self._consume_first(work, device)
    with self.assertRaises(errors.WorkerUnavailableError):
      step()
    self.assertEqual(group.record, [0])

  def test_xla_is_refused(self):
    ring = collective_queue.CollectiveQueue(_RecordingGroup())
    inner = tf.function(lambda x: _call(ring, x, 'x'))
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'jit_compile=False'
    ):
      tf.function(inner, jit_compile=True)(tf.constant([1.0]))


def _fail(ring, error, x):
  def work(group, array):
    raise error

  return ring.call('kind', work, x, x.shape)


def _in_dataset(unused_fail):
  def host(x):
    with _graph_errors.typed():
      raise _lost()
    return x

  dataset = tf.data.Dataset.range(3).map(
    lambda i: tf.numpy_function(host, [i], tf.int64)
  )
  list(dataset)


_PLACES = {
  'while': lambda fail: tf.function(
    lambda x: tf.while_loop(
      lambda i, _: i < 3, lambda i, y: (i + 1, fail(y)), [tf.constant(0), x]
    )
  )(tf.constant(1.0)),
  'dataset': _in_dataset,
  'eager': lambda fail: fail(tf.constant(1.0)),
}


class FailuresTest(tf.test.TestCase, parameterized.TestCase):
  def _raised(self, place, error):
    ring = collective_queue.CollectiveQueue(_RecordingGroup())
    with self.assertRaises(type(error)) as caught:
      _PLACES[place](lambda x: _fail(ring, error, x))
    return caught.exception

  @parameterized.parameters(*_PLACES)
  def test_typed_errors_leave_with_all_they_know(self, place):
    raised = self._raised(place, _lost())
    for each in (raised, pickle.loads(pickle.dumps(raised))):
      self.assertIsInstance(each, errors.WorkerUnavailableError)
      self.assertEqual((each.rank, each.address), (3, 'host:2222'))
      self.assertEqual(str(each), str(_lost()))
    # Code that was written for TensorFlow's error catches it as well.
    self.assertEqual(
      isinstance(raised, tf.errors.UnknownError), place != 'eager'
    )

  def test_errors_of_the_same_step_twice_are_two(self):
    ring = collective_queue.CollectiveQueue(_RecordingGroup())
    ranks = iter((5, 6))

    def work(group, array):
      raise _lost(next(ranks))

    step = tf.function(lambda x: ring.call('kind', work, x, x.shape))
    for rank in (5, 6):
      with self.assertRaises(errors.WorkerUnavailableError) as caught:
        step(tf.constant(1.0))
      self.assertEqual(caught.exception.rank, rank)

  def test_other_exceptions_stay_what_tensorflow_makes_of_them(self):
    ring = collective_queue.CollectiveQueue(_RecordingGroup())
    with self.assertRaises(tf.errors.UnknownError) as caught:
      _PLACES['while'](lambda x: _fail(ring, RuntimeError('plain'), x))
    self.assertIs(type(caught.exception), tf.errors.UnknownError)
    self.assertIn('plain', caught.exception.message)
    made = tf.errors.UnknownError(None, None, 'a [host failure x]')
    self.assertIs(type(made), tf.errors.UnknownError)
    self.assertEqual(made.message, 'a [host failure x]')

  def test_closed_ring_says_so_or_names_the_failure_of_its_group(self):
    for failure, rank in ((None, None), (_lost(rank=2), 2)):
      group = _RecordingGroup()
      ring = collective_queue.CollectiveQueue(group)
      in_graph = tf.function(lambda x, ring=ring: _call(ring, x, 'x'))
      in_graph(tf.constant(1.0))
      group.failure = failure
      ring.close()
      for step in (in_graph, lambda x, ring=ring: _call(ring, x, 'x')):
        with self.assertRaises(errors.WorkerUnavailableError) as caught:
          step(tf.constant(1.0))
        self.assertEqual(caught.exception.rank, rank)
        if failure is None:
          self.assertIn('closed its group', str(caught.exception))
      self.assertEqual(group.record, ['x'])

  def test_many_failures_are_forgotten(self):
    for _ in range(3 * _graph_errors._MAX_HOST_FAILURES):
      with self.assertRaises(RuntimeError):
        _graph_errors.raise_through_graph(_lost())
    self.assertLen(
      _graph_errors._host_failures, _graph_errors._MAX_HOST_FAILURES
    )
    # The newest one is known still.
    self.assertEqual(self._raised('while', _lost(rank=8)).rank, 8)


if __name__ == '__main__':
  tf.test.main()
