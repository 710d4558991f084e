"""Host calls keep their order, wait for all results, and raise typed errors."""

import functools
import pickle
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import tf_case, virtual_devices
from tf_strategies import errors
from tf_strategies.strategies.multi_worker import collective_queue

virtual_devices.configure()


class _RecordingGroup:
  """A fake process group that records its calls and adds `more`."""

  def __init__(self, more=0):
    self.failure = None
    self.record = []
    self._more = more

  def name_calls_by(self, running_call):
    del running_call

  def add(self, array, name, seconds=0.0):
    time.sleep(seconds)
    self.record.append(name)
    return array + np.asarray(self._more, array.dtype)


def _lost(rank=3):
  error = errors.WorkerUnavailableError(f'rank {rank} is gone: [brackets] {{}}')
  error.rank = rank
  error.address = 'host:2222'
  return error


def _call(queue, x, name, seconds=0.0):
  return queue.call('kind', lambda g, a: g.add(a, name, seconds), x, x.shape)


def _program(queue):
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
    return _call(queue, x, name, 0.05)

  def loop(name, turns, x):
    return tf.while_loop(
      lambda i, _: i < turns,
      lambda i, _: (i + 1, call_with_variable(name, x)),
      [tf.constant(0), x],
    )[1]

  @tf.function
  def step(x, flag):
    requests = [
      collective_queue.QueuedWork(
        lambda g, a, i=i: g.add(a, f'all_{i}'), x + float(i), ''
      )
      for i in range(2)
    ]
    return [
      loop('while', 3, x),
      *queue.call_all('kind_all', requests, virtual_devices.HOST),
      tf.cond(
        flag,
        lambda: call_with_variable('if', x),
        lambda: _call(queue, x, 'else'),
      ),
      _call(queue, x, 'middle'),
      tf.function(call_with_variable)('inner', x),
      loop('second', 2, x),
      _call(queue, x, 'last'),
    ]

  return step


class OrderTest(tf.test.TestCase):
  @pytest.mark.smoke
  def test_calls_keep_program_order_in_control_flow_and_functions(self):
    names = ['while'] * 3 + ['all_0', 'all_1', 'if', 'middle', 'inner']
    names += ['second', 'second', 'last']
    group = _RecordingGroup(more=10)
    step = _program(collective_queue.CollectiveQueue(group))
    for _ in range(3):
      group.record.clear()
      results = step(tf.constant([1.0, 2.0]), tf.constant(True))
      self.assertEqual(group.record, names)
      self.assertAllClose(
        results, [[11.0, 12.0]] * 2 + [[12.0, 13.0]] + [[11.0, 12.0]] * 5
      )


class ResultsTest(tf_case.TestCase):
  @parameterized.product(
    # Results for another device are copied as soon as each is available.
    device=(virtual_devices.HOST, virtual_devices.name(1)),
    fails=(False, True),
  )
  def test_results_are_used_only_if_all_calls_succeed(self, device, fails):
    """Makes calls for two tensors. A host function reads the result of the first."""
    group = _RecordingGroup(more=5)
    queue = collective_queue.CollectiveQueue(group)

    def work(group, array, index):
      if fails and index:
        raise _lost()
      return group.add(array, index, 0.3 * index)

    @tf.function
    def step():
      requests = [
        collective_queue.QueuedWork(
          functools.partial(work, index=i), tf.constant([1, 2]), ''
        )
        for i in range(2)
      ]
      first, _ = queue.call_all('kind', requests, device)
      return tf.numpy_function(
        lambda a: group.add(a, f'saw {a.tolist()}'), [first], tf.int32
      )

    if fails:
      with self.assertRaises(errors.WorkerUnavailableError):
        step()
      self.assertEqual(group.record, [0])
    else:
      self.assertAllEqual(step(), [11, 12])
      self.assertEqual(group.record, [0, 1, 'saw [6, 7]'])

  def test_xla_is_refused(self):
    queue = collective_queue.CollectiveQueue(_RecordingGroup())
    inner = tf.function(lambda x: _call(queue, x, 'x'))
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'jit_compile=False'
    ):
      tf.function(inner, jit_compile=True)(tf.constant([1.0]))


class FailuresTest(tf_case.TestCase):
  def raised(self, error, wrap=tf.function):
    """Returns the error of a loop whose collective raises `error`."""
    queue = collective_queue.CollectiveQueue(_RecordingGroup())

    def work(group, array):
      raise error

    def step(x):
      return tf.while_loop(
        lambda i, _: i < 3,
        lambda i, y: (i + 1, queue.call('kind', work, y, y.shape)),
        [tf.constant(0), x],
      )

    expected = type(error), tf.errors.UnknownError
    with self.assertRaises(expected) as caught:
      wrap(step)(tf.constant(1.0))
    return caught.exception

  @parameterized.parameters(tf.function, lambda step: step)
  def test_typed_error_keeps_its_attributes(self, wrap):
    raised = self.raised(_lost(), wrap)
    for each in (raised, pickle.loads(pickle.dumps(raised))):
      self.assertIsInstance(each, errors.WorkerUnavailableError)
      self.assertEqual((each.rank, each.address), (3, 'host:2222'))
      self.assertEqual(str(each), str(_lost()))
    # Code that was written for TensorFlow's error catches it as well.
    self.assertEqual(
      isinstance(raised, tf.errors.UnknownError), wrap is tf.function
    )

  def test_each_failure_of_a_step_raises_its_own_error(self):
    queue = collective_queue.CollectiveQueue(_RecordingGroup())
    ranks = iter((5, 6))

    def work(group, array):
      raise _lost(next(ranks))

    step = tf.function(lambda x: queue.call('kind', work, x, x.shape))
    for rank in (5, 6):
      with self.assertRaises(errors.WorkerUnavailableError) as caught:
        step(tf.constant(1.0))
      self.assertEqual(caught.exception.rank, rank)

  def test_other_exceptions_become_tensorflow_errors(self):
    raised = self.raised(RuntimeError('plain'))
    self.assertIs(type(raised), tf.errors.UnknownError)
    self.assertIn('plain', raised.message)

  @parameterized.parameters((None, None), (_lost(rank=2), 2))
  def test_closed_queue_raises_the_failure_of_its_group(self, failure, rank):
    group = _RecordingGroup()
    queue = collective_queue.CollectiveQueue(group)
    in_graph = tf.function(lambda x: _call(queue, x, 'x'))
    in_graph(tf.constant(1.0))
    group.failure = failure
    queue.close()
    for step in (in_graph, lambda x: _call(queue, x, 'x')):
      with self.assertRaises(errors.WorkerUnavailableError) as caught:
        step(tf.constant(1.0))
      self.assertEqual(caught.exception.rank, rank)
      if failure is None:
        self.assertIn('closed its group', str(caught.exception))
    self.assertEqual(group.record, ['x'])


if __name__ == '__main__':
  tf.test.main()
