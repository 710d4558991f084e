"""Sums in codecs: formulas, rests, special values, and the effect of feedback.

The workers are threads, whose group adds as the simulator does.
"""

import concurrent.futures
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.collectives.simulator import simulate
from tf_strategies.collectives import codecs
from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.strategies.multi_worker import gradient_sums

virtual_devices.configure()

_SHAPES = ((40, 24), (24,), (3, 3, 8, 16))


# The ops of one thread at a time: see docs/gpus.md.
_EAGER = threading.Lock()


class _Meeting:
  """Collects arrays from threads, and gives each thread the result of all."""

  def __init__(self, size):
    self._arrays = [None] * size
    self._barrier = threading.Barrier(size, self._compute, timeout=60)

  def meet(self, rank, array, compute):
    self._arrays[rank], self._work = array, compute
    _EAGER.release()
    try:
      self._barrier.wait()
      result = self._result
      self._barrier.wait()
    finally:
      _EAGER.acquire()
    return result

  def _compute(self):
    self._result = self._work(list(self._arrays))

  def abort(self):
    self._barrier.abort()


class _Group:
  """One thread's group."""

  def __init__(self, meeting, rank, size):
    self._meeting, self.rank, self.world_size = meeting, rank, size
    self.names = []

  def all_reduce(
    self, array, *, name, algorithm, compression, out=None, residual=None
  ):
    self.names.append(name)
    schedule = ALGORITHMS['direct'](self.world_size)
    del algorithm

    def add(arrays):
      rests = [np.empty_like(a) for a in arrays]
      totals = simulate(schedule, arrays, compression, residuals=rests).outputs
      return totals, rests

    totals, rests = self._meeting.meet(self.rank, array, add)
    if residual is not None:
      out[:], residual[:] = totals[self.rank], rests[self.rank]
      return out
    return totals[self.rank].copy()


class _Workers:
  """Workers that sum the gradients of the same variables, step by step."""

  def __init__(self, codec, shapes, size=2, bucket_bytes=2000, feeds=True):
    self._codec = codecs.get(codec)
    self.size, self._feeds = size, feeds
    self._sending = [
      gradient_sums.Sending(bucket_bytes, 'auto', size) for _ in range(size)
    ]
    self.rests = [
      [
        self._rest(shape) if self._codec.keeps_rest else None
        for shape in shapes
      ]
      for _ in range(size)
    ]

  def _rest(self, shape):
    variable = tf.Variable(np.zeros(shape, np.float32))
    return gradient_sums.rest_of(variable, virtual_devices.name(0))

  def step(self, gradients):
    """The sums on each worker, of its gradients."""
    meeting = _Meeting(self.size)

    def work(rank):
      try:
        with _EAGER:
          group = _Group(meeting, rank, self.size)
          return self._step(group, gradients[rank])
      except BaseException:
        meeting.abort()
        raise

    with concurrent.futures.ThreadPoolExecutor(self.size) as pool:
      sums = list(pool.map(work, range(self.size)))
    for other in sums[1:]:
      for a, b in zip(sums[0], other, strict=True):
        np.testing.assert_array_equal(a, b)
    return sums[0]

  def _step(self, group, gradients):
    # Gradients beyond those of all variables are further ones of the first.
    rests = self.rests[group.rank]
    items = [
      gradient_sums.Item(tf.constant(g), self._codec, rests[i % len(rests)])
      for i, g in enumerate(gradients)
    ]

    def send(packed, works):
      buckets = zip(works, packed.buckets, strict=True)
      return [
        tf.constant(work(group, bucket.numpy(), f'bucket_{i}'))
        for i, (work, bucket) in enumerate(buckets)
      ]

    writes = {}
    sums = gradient_sums.all_reduce(
      items, self._sending[group.rank], send, writes
    )
    if self._feeds:
      for reference, value in writes.items():
        reference.deref().assign(value)
    return [s.numpy() for s in sums]

  def unsent(self, i):
    """Returns what all workers have not sent of a variable."""
    if self.rests[0][i] is None:
      return 0.0
    return sum(rests[i].numpy().astype(np.float64) for rests in self.rests)


def _gradients(size, shapes, seed=0):
  random = np.random.default_rng(seed)
  return [
    [random.normal(size=shape).astype(np.float32) for shape in shapes]
    for _ in range(size)
  ]


class SumsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(method=('none', 'int8'), size=(2, 3))
  def test_what_was_sent_and_what_is_left_is_what_there_was(self, method, size):
    workers = _Workers(method, _SHAPES, size)
    wanted = [np.zeros(shape) for shape in _SHAPES]
    sent = [np.zeros(shape) for shape in _SHAPES]
    for step in range(5):
      gradients = _gradients(size, _SHAPES, step)
      for i, total in enumerate(workers.step(gradients)):
        wanted[i] += sum(g[i].astype(np.float64) for g in gradients)
        sent[i] += total
    for i, shape in enumerate(_SHAPES):
      self.assertAllClose(sent[i] + workers.unsent(i), wanted[i], 0, 1e-4)
      left = np.abs(workers.unsent(i)).max()
      if method == 'int8':
        self.assertGreater(left, 1e-3, (method, shape))
      else:
        self.assertEqual(left, 0, (method, shape))

  def test_of_two_gradients_of_a_variable_nothing_is_lost(self):
    """Checks that the rest counts once in a step, and that each gradient leaves one."""
    [shape] = shapes = _SHAPES[:1]
    workers = _Workers('int8', shapes)
    wanted, sent = np.zeros(shape), np.zeros(shape)
    for step in range(4):
      gradients = _gradients(2, [shape, shape], step)
      sent += sum(workers.step(gradients))
      wanted += np.sum(gradients, (0, 1), np.float64)
    self.assertGreater(np.abs(workers.unsent(0)).max(), 1e-3)
    self.assertAllClose(sent + workers.unsent(0), wanted, 0, 1e-4)

  @parameterized.parameters(2, 3)
  def test_int8_errs_by_a_step_at_most(self, size):
    [gradients] = [_gradients(size, [(1000,)])]
    [total] = _Workers('int8', [(1000,)], size).step(gradients)
    want = np.sum([g[0] for g in gradients], 0, np.float64)
    largest = sum(np.abs(g[0]).max() for g in gradients) + np.abs(want).max()
    error = np.abs(total - want).max()
    self.assertBetween(error, 1e-3, largest / 254)


class SpecialValuesTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_what_is_not_finite_arrives_and_leaves_nothing(self, odd):
    workers = _Workers('int8', _SHAPES)
    workers.step(_gradients(2, _SHAPES))
    before = [[v.numpy() for v in rests] for rests in workers.rests]
    gradients = _gradients(2, _SHAPES, 1)
    gradients[1][0][3, 7] = odd
    sums = workers.step(gradients)
    self.assertFalse(np.isfinite(sums[0]).all())
    after = [[v.numpy() for v in rests] for rests in workers.rests]
    # Also of variables whose own sums are finite: the step is left out.
    for a, b in zip(before, after, strict=True):
      for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
    for total in workers.step(_gradients(2, _SHAPES, 2)):
      self.assertTrue(np.isfinite(total).all())


class FeedbackTest(tf.test.TestCase, parameterized.TestCase):
  """Small gradients beside large ones that come and go."""

  def _sent(self, feeds):
    """The share of the small gradients that has arrived after many steps."""
    shape, steps = (32, 16), 200
    workers = _Workers('int8', [shape], feeds=feeds)
    random = np.random.default_rng(0)
    small = np.full(shape, 0.01, np.float32)
    arrived, large = np.zeros(shape), np.zeros(shape, np.float32)
    for step in range(steps):
      # Each step subtracts the value that the step before added.
      large = -large
      if step % 2 == 0:
        large[:, :8] = 3.0 * random.normal(size=[32, 8])
      arrived += workers.step([[small + large], [small - large / 2]])[0]
    return arrived[:, 8:].mean() / (2 * steps * small[0, 0])

  @pytest.mark.smoke
  def test_nothing_is_lost_for_ever(self):
    self.assertAllClose(self._sent(feeds=True), 1, atol=0.15)

  @pytest.mark.smoke
  def test_without_feedback_it_is(self):
    """Checks that the test detects a missing feedback."""
    self.assertLess(self._sent(feeds=False), 0.7)


class GradientRestsTest(tf.test.TestCase):
  def test_of_each_variable_one_that_goes_with_it(self):
    device = virtual_devices.name(0)
    one, other = tf.Variable(tf.zeros([9, 8])), tf.Variable(tf.zeros([9, 8]))
    rest = gradient_sums.rest_of(one, device)
    self.assertIs(gradient_sums.rest_of(one, device), rest)
    self.assertIsNot(gradient_sums.rest_of(other, device), rest)
    self.assertEqual(rest.shape, [9, 8])
    is_there = weakref.ref(rest)
    del one, rest
    self.assertIsNone(is_there())


if __name__ == '__main__':
  tf.test.main()
