"""Host calls keep their order, wait for all results, and fail with a type."""

import pickle
import time
import types

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices
from tests.collectives import simulator
from tf_strategies import _graph_errors, errors
from tf_strategies.collectives.codecs import CODECS
from tf_strategies.collectives.schedule import chunk_sizes
from tf_strategies.keras import gradient_reducer
from tf_strategies.strategies.multi_worker import (
  collective_queue,
  process_group_communicator,
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


class _CodedGroup:
  """Stands for a group of three: does to an array what a codec does to a chunk."""

  rank, world_size, failure = 0, 3, None

  def all_reduce(
    self, array, *, name, algorithm, compression, out=None, residual=None
  ):
    del name, algorithm
    codec = CODECS[compression]
    ends = np.cumsum(chunk_sizes(len(array), self.world_size))
    decoded = np.concatenate(
      [simulator.round_trip(codec, c) for c in np.split(array, ends[:-1])]
    )
    if residual is not None:
      out[:], residual[:] = decoded, array - decoded
    return decoded


class _Unordered(collective_queue.CollectiveQueue):
  """A mutation: host calls without the token."""

  def _in_order(self, host, inputs, dtypes):
    *results, _ = tf.numpy_function(
      host, [*inputs, tf.constant(0, tf.int64)], [*dtypes, tf.int64]
    )
    return results


def _lost(rank=3):
  error = errors.WorkerUnavailableError(f'rank {rank} is gone: [brackets] {{}}')
  error.rank = rank
  error.address = 'host:2222'
  return error


def _call(ring, x, name, seconds=0.0):
  return ring.call('kind', lambda g, a: g.add(a, name, seconds), x, x.shape)


def _request(work, tensor):
  return collective_queue.QueuedWork(work, tensor, '')


def _call_all(ring, tensors, name, seconds=0.0, device=virtual_devices.HOST):
  requests = [
    _request(lambda g, a, i=i: g.add(a, f'{name}{i}', seconds), tensor)
    for i, tensor in enumerate(tensors)
  ]
  return ring.call_all('kind_all', requests, device)


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
  def _record(self, ring_type):
    group = _RecordingGroup(more=10)
    step = _program(ring_type(group))
    records = []
    for _ in range(3):
      group.record.clear()
      results = step(tf.constant([1.0, 2.0]), tf.constant(True))
      records.append(list(group.record))
      self.assertAllClose(
        results, [[11.0, 12.0]] * 2 + [[12.0, 13.0]] + [[11.0, 12.0]] * 5
      )
    return records

  @pytest.mark.smoke
  def test_program_order_across_control_flow_and_functions(self):
    self.assertEqual(
      self._record(collective_queue.CollectiveQueue), [_EXPECTED] * 3
    )

  def test_without_the_token_calls_overtake_each_other(self):
    records = self._record(_Unordered)
    for record in records:
      self.assertCountEqual(record, _EXPECTED)
    self.assertNotEqual(records, [_EXPECTED] * 3)


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

  @parameterized.product(
    eagerly=(True, False),
    device=(virtual_devices.HOST, virtual_devices.name(1)),
  )
  def test_values_dtypes_and_counts(self, eagerly, device):
    group = _RecordingGroup(more=1)
    ring = collective_queue.CollectiveQueue(group)
    tensors = [tf.constant([i, i + 1], t) for i, t in enumerate(_DTYPES)]

    def step():
      scalar = _call(ring, tf.constant(7, tf.int64), 'scalar')
      return [scalar, *_call_all(ring, tensors, 'x', device=device)]

    results = step() if eagerly else tf.function(step)()
    self.assertEqual(results[0].dtype, tf.int64)
    self.assertAllEqual(results[0], 8)
    for i, (result, dtype) in enumerate(zip(results[1:], _DTYPES, strict=True)):
      self.assertEqual((result.dtype, result.shape), (dtype, [2]))
      self.assertAllEqual(result, [i + 1, i + 2])
    self.assertEqual(group.record, ['scalar', 'x0', 'x1', 'x2'])
    self.assertEqual(ring.calls, {'kind': 1, 'kind_all': 3})

  def test_xla_is_refused(self):
    ring = collective_queue.CollectiveQueue(_RecordingGroup())
    x = tf.constant([1.0])
    for call in (
      lambda x: _call(ring, x, 'x'),
      lambda x: _call_all(ring, [x], 'x'),
      tf.function(lambda x: _call(ring, x, 'x')),
    ):
      with self.assertRaisesRegex(
        errors.UnsupportedOptionError, 'jit_compile=False'
      ):
        tf.function(call, jit_compile=True)(x)


def _communicator(options, device=virtual_devices.HOST):
  local = types.SimpleNamespace(devices=(device,), num_replicas=1)
  return process_group_communicator.ProcessGroupCommunicator(
    _CodedGroup(), local, options
  )


class BucketsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(
    eagerly=(True, False),
    device=(virtual_devices.HOST, virtual_devices.name(1)),
  )
  def test_small_gradients_keep_their_precision_beside_large_ones(
    self, eagerly, device
  ):
    communicator = _communicator(tfs.RingOptions(compression='int8'), device)
    gradients = [
      scale * np.arange(1, size + 1, dtype=np.float32)
      for scale, size in ((1e-6, 10), (1e3, 700), (1e-3, 300), (1.0, 3))
    ]
    variables = [tf.Variable(g) for g in gradients]

    def step():
      [reduced] = communicator.all_reduce(
        [list(map(tf.constant, gradients))],
        'x',
        gradient_reducer.Gradients(variables),
      )
      return reduced

    reduced = step() if eagerly else tf.function(step)()
    for want, got in zip(gradients, reduced, strict=True):
      # Half a step of 127, of the largest of the gradient itself.
      self.assertAllClose(want, got, rtol=0, atol=want.max() / 250)
    # The rest of each variable is kept, in the variable's precision.
    kept = communicator.gradient_state(variables)
    for rest, want, got in zip(kept.values(), gradients, reduced, strict=True):
      self.assertAllClose(rest, want - got, rtol=0, atol=want.max() * 1e-6)
    # All travelled together.
    self.assertEqual(communicator._queue.calls, {'all_reduce': 1})

  @parameterized.parameters(
    (virtual_devices.HOST, 1), (virtual_devices.name(1), 2)
  )
  def test_buckets_are_packed_where_gradients_are(self, device, waits):
    """A check of the graph: whether copies overlap only a GPU can show."""
    communicator = _communicator(tfs.RingOptions(bucket_bytes=64), device)

    @tf.function
    def step():
      with tf.device(device):
        gradients = [tf.fill([8], float(i)) for i in range(4)]
      return communicator.all_reduce([gradients], 'x')[0]

    nodes = step.get_concrete_function().graph.get_operations()
    on = {kind: [] for kind in ('ConcatV2', 'SplitV', 'PyFunc')}
    for node in nodes:
      if node.type in on:
        on[node.type].append(node.device[-len(device) :])
    self.assertEqual(on['ConcatV2'], [device] * 2)
    self.assertEqual(on['SplitV'], [device] * 2)
    # A call hands a bucket over; one waits for all, or for each to copy it.
    self.assertEqual(on['PyFunc'], [virtual_devices.HOST] * (2 + waits))
    for i, reduced in enumerate(step()):
      self.assertAllEqual(reduced, [float(i)] * 8)


_DTYPES = (tf.float32, tf.int32, tf.uint16)


def _fail(ring, error, x):
  def work(group, array):
    raise error

  return ring.call('kind', work, x, x.shape)


def _in_dataset(fail):
  def host(x):
    with _graph_errors.typed():
      raise _lost()
    return x

  del fail
  dataset = tf.data.Dataset.range(3).map(
    lambda i: tf.numpy_function(host, [i], tf.int64)
  )
  list(dataset)


_X = 1.0
_PLACES = {
  'function': lambda fail: tf.function(fail)(tf.constant(_X)),
  'nested': lambda fail: tf.function(tf.function(fail))(tf.constant(_X)),
  'while': lambda fail: tf.function(
    lambda x: tf.while_loop(
      lambda i, _: i < 3, lambda i, y: (i + 1, fail(y)), [tf.constant(0), x]
    )
  )(tf.constant(_X)),
  'cond': lambda fail: tf.function(
    lambda x: tf.cond(x > 0, lambda: fail(x), lambda: x)
  )(tf.constant(_X)),
  'dataset': _in_dataset,
  'eager': lambda fail: fail(tf.constant(_X)),
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
    self.assertEqual(type(raised).__name__, 'WorkerUnavailableError')
    self.assertEqual(raised.rank, 3)
    self.assertEqual(raised.address, 'host:2222')
    self.assertEqual(str(raised), str(_lost()))
    self.assertIn('rank 3 is gone', repr(raised))
    # Code that was written for TensorFlow's error catches it as well.
    self.assertEqual(
      isinstance(raised, tf.errors.UnknownError), place != 'eager'
    )

  @parameterized.parameters(
    errors.CollectiveMismatchError,
    errors.CollectiveTimeoutError,
    errors.RendezvousError,
    errors.UnsupportedOptionError,
  )
  def test_every_type_leaves_a_function(self, error_type):
    error = error_type('what, where, and the way out')
    error.ranks = (1, 2)
    raised = self._raised('function', error)
    self.assertEqual(str(raised), 'what, where, and the way out')
    self.assertEqual(raised.ranks, (1, 2))
    self.assertIsInstance(raised, error_type.__mro__[2])

  def test_errors_of_the_same_step_twice_are_two(self):
    ring = collective_queue.CollectiveQueue(_RecordingGroup())
    ranks = iter((5, 6))
    step = tf.function(
      lambda x: ring.call('kind', _raise_next(ranks), x, x.shape)
    )
    for rank in (5, 6):
      with self.assertRaises(errors.WorkerUnavailableError) as caught:
        step(tf.constant(1.0))
      self.assertEqual(caught.exception.rank, rank)

  @parameterized.parameters('function', 'while', 'cond')
  def test_other_exceptions_stay_what_tensorflow_makes_of_them(self, place):
    for error in (RuntimeError('plain'), ZeroDivisionError('by nothing')):
      ring = collective_queue.CollectiveQueue(_RecordingGroup())
      with self.assertRaises(tf.errors.UnknownError) as caught:
        _PLACES[place](lambda x, r=ring, e=error: _fail(r, e, x))
      self.assertIs(type(caught.exception), tf.errors.UnknownError)
      self.assertIn(str(error), caught.exception.message)

  def test_plain_unknown_errors_can_still_be_made(self):
    self._raised('function', _lost())
    made = tf.errors.UnknownError(None, None, 'a [host failure x]')
    self.assertIs(type(made), tf.errors.UnknownError)
    self.assertEqual(made.message, 'a [host failure x]')
    self.assertEqual(made.error_code, tf.errors.UNKNOWN)

  def test_closed_ring_says_so(self):
    ring = collective_queue.CollectiveQueue(_RecordingGroup())
    in_graph = tf.function(lambda x: _call(ring, x, 'x'))
    in_graph(tf.constant(1.0))
    ring.close()
    for step in (in_graph, lambda x: _call(ring, x, 'x')):
      with self.assertRaisesRegex(
        errors.WorkerUnavailableError, 'closed its group'
      ):
        step(tf.constant(1.0))

  def test_closed_ring_names_the_failure_of_its_group(self):
    group = _RecordingGroup()
    ring = collective_queue.CollectiveQueue(group)
    step = tf.function(lambda x: _call(ring, x, 'x'))
    step(tf.constant(1.0))
    group.failure = _lost(rank=2)
    ring.close()
    with self.assertRaises(errors.WorkerUnavailableError) as caught:
      step(tf.constant(1.0))
    self.assertEqual(caught.exception.rank, 2)
    self.assertEqual(group.record, ['x'])

  def test_many_failures_are_forgotten(self):
    for _ in range(3 * _graph_errors._MAX_HOST_FAILURES):
      with self.assertRaises(RuntimeError):
        _graph_errors.raise_through_graph(_lost())
    self.assertLen(
      _graph_errors._host_failures, _graph_errors._MAX_HOST_FAILURES
    )
    # The newest one is known still.
    self.assertEqual(self._raised('function', _lost(rank=8)).rank, 8)


class PicklingTest(tf.test.TestCase):
  """A worker sends its failure to whoever started it."""

  def test_error_of_a_graph_survives(self):
    ring = collective_queue.CollectiveQueue(_RecordingGroup())
    with self.assertRaises(errors.WorkerUnavailableError) as caught:
      tf.function(lambda x: _fail(ring, _lost(), x))(tf.constant(1.0))
    copy = pickle.loads(pickle.dumps(caught.exception))
    self.assertIsInstance(copy, errors.WorkerUnavailableError)
    self.assertEqual(str(copy), str(_lost()))
    self.assertEqual((copy.rank, copy.address), (3, 'host:2222'))


def _raise_next(ranks):
  def work(group, array):
    raise _lost(next(ranks))

  return work


if __name__ == '__main__':
  tf.test.main()
