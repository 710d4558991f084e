"""Compressors: formulas, what is kept, special values, what feedback is for.

The workers are threads, whose group adds up as the simulator does.
"""

import concurrent.futures
import threading

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

from tests import tiers, virtual_devices
from tf_strategies import collectives
from tf_strategies.collectives import compression as compression_lib
from tf_strategies.strategies.multi_worker import compressors, gradient_state

virtual_devices.configure()

_METHODS = ('int8', 'powersgd(2)', 'topk(0.1)')
# And gradients beside which others of 0.01 are small.
_LARGE = (
  ('int8', 3.0),
  tiers.full('powersgd(1)', 1.0),
  tiers.full('topk(0.1)', 0.1),
)
_SHAPES = ((40, 24), (24,), (3, 3, 8, 16))


# The ops of one thread at a time: see docs/gpus.md.
_EAGER = threading.Lock()


class _Meeting:
  """Where threads leave arrays, and each gets what came of all of them."""

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
    schedule = collectives.ALGORITHMS['direct'](self.world_size)
    del algorithm

    def add(arrays):
      rests = [np.empty_like(a) for a in arrays]
      totals = collectives.simulate(
        schedule, arrays, compression, residuals=rests
      ).outputs
      return totals, rests

    totals, rests = self._meeting.meet(self.rank, array, add)
    if residual is not None:
      out[:], residual[:] = totals[self.rank], rests[self.rank]
      return out
    return totals[self.rank].copy()

  def all_gather(self, array, *, name):
    self.names.append(name)
    return self._meeting.meet(self.rank, array, lambda arrays: arrays)


class _Workers:
  """Workers that sum the gradients of the same variables, step by step."""

  def __init__(self, method, shapes, size=2, bucket_bytes=2000, feeds=True):
    parsed = compression_lib.parse(method)
    self._compressions = [
      parsed if parsed.applies(shape) else compression_lib.parse('none')
      for shape in shapes
    ]
    self.size, self._feeds = size, feeds
    variables = [tf.Variable(np.zeros(shape, np.float32)) for shape in shapes]
    self._variables = variables  # Only as long as they live.
    self._sending = [
      compressors.Sending(bucket_bytes, 'auto', size) for _ in range(size)
    ]
    states = [
      gradient_state.GradientState(virtual_devices.name(0)) for _ in range(size)
    ]
    self.kept = [
      [
        state.of(v, c) if c.keeps_rest else None
        for v, c in zip(variables, self._compressions, strict=True)
      ]
      for state in states
    ]

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
    count = len(self._compressions)
    items = [
      compressors.Item(
        tf.constant(g),
        self._compressions[i % count],
        self.kept[group.rank][i % count],
      )
      for i, g in enumerate(gradients)
    ]

    def send(requests):
      return [
        tf.constant(r.work(group, r.tensor.numpy(), f'bucket_{i}'))
        for i, r in enumerate(requests)
      ]

    writes = {}
    sums = compressors.all_reduce(
      items, self._sending[group.rank], send, writes
    )
    if self._feeds:
      for reference, value in writes.items():
        reference.deref().assign(value)
    return [s.numpy() for s in sums]

  def rests(self, i):
    """What all workers have not sent of a variable."""
    if self.kept[0][i] is None:
      return 0.0
    return sum(kept[i].rest.numpy().astype(np.float64) for kept in self.kept)


def _gradients(size, shapes, seed=0):
  random = np.random.default_rng(seed)
  return [
    [random.normal(size=shape).astype(np.float32) for shape in shapes]
    for _ in range(size)
  ]


class SumsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(method=('none', *_METHODS), size=(2, 3))
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
      self.assertAllClose(sent[i] + workers.rests(i), wanted[i], 0, 1e-4)
      left = np.abs(workers.rests(i)).max()
      if compression_lib.parse(method).applies(shape):
        self.assertGreater(left, 1e-3, (method, shape))
      else:
        self.assertEqual(left, 0, (method, shape))

  @parameterized.parameters(*_METHODS)
  def test_of_two_gradients_of_a_variable_nothing_is_lost(self, method):
    """What was left counts once in a step, and what each of them leaves does."""
    [shape] = shapes = _SHAPES[:1]
    workers = _Workers(method, shapes)
    wanted, sent = np.zeros(shape), np.zeros(shape)
    for step in range(4):
      gradients = _gradients(2, [shape, shape], step)
      sent += sum(workers.step(gradients))
      wanted += np.sum(gradients, (0, 1), np.float64)
    self.assertGreater(np.abs(workers.rests(0)).max(), 1e-3)
    self.assertAllClose(sent + workers.rests(0), wanted, 0, 1e-4)

  @parameterized.parameters(2, 3)
  def test_int8_errs_by_a_step_at_most(self, size):
    [gradients] = [_gradients(size, [(1000,)])]
    [total] = _Workers('int8', [(1000,)], size).step(gradients)
    want = np.sum([g[0] for g in gradients], 0, np.float64)
    largest = sum(np.abs(g[0]).max() for g in gradients) + np.abs(want).max()
    error = np.abs(total - want).max()
    self.assertBetween(error, 1e-3, largest / 254)

  @hypothesis.settings(deadline=None, max_examples=25)
  @hypothesis.given(
    st.lists(
      st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
      min_size=1,
      max_size=60,
    )
  )
  def test_top_k_is_the_largest_of_each(self, values):
    values = np.array(values, np.float32)
    gradients = [[values], [values[::-1].copy()]]
    workers = _Workers('topk(0.2)', [values.shape])
    [total] = workers.step(gradients)
    count = -(-len(values) // 5)
    want = np.zeros_like(values)
    for rank, [gradient] in enumerate(gradients):
      rest = workers.kept[rank][0].rest.numpy()
      sent = np.where(rest == 0, gradient, 0)
      self.assertLessEqual(np.count_nonzero(sent), count)
      np.testing.assert_array_equal(sent + rest, gradient)
      # Nothing that is left is larger than what went.
      least = np.sort(np.abs(gradient))[-count]
      self.assertLessEqual(np.abs(rest).max(), least)
      want += sent
    np.testing.assert_array_equal(total, want)

  @parameterized.parameters(2, 3)
  def test_power_sgd_is_a_projection_of_the_sum(self, size):
    shape = (30, 20)
    gradients = _gradients(size, [shape])
    [total] = _Workers('powersgd(3)', [shape], size).step(gradients)
    matrix = np.sum([g[0] for g in gradients], 0, np.float64)
    first = gradient_state.first_factor(shape, 3)
    basis, _ = np.linalg.qr(matrix @ first)
    self.assertAllClose(total, basis @ basis.T @ matrix, 1e-4, 1e-4)

  def test_power_sgd_of_a_matrix_of_low_rank_is_exact(self):
    random = np.random.default_rng(3)
    factors = random.normal(size=[30, 2]), random.normal(size=[2, 20])
    matrix = (factors[0] @ factors[1]).astype(np.float32)
    workers = _Workers('powersgd(2)', [(30, 20)])
    for scale in (1.0, 0.1):
      [total] = workers.step([[matrix * scale], [matrix * scale]])
      self.assertAllClose(total, 2 * scale * matrix, 1e-4, 1e-4)

  def test_power_sgd_warms_up(self):
    """Again and again the same gradient: the directions become the best."""
    [gradients] = [_gradients(2, [(30, 20)])]
    matrix = np.sum([g[0] for g in gradients], 0)
    u, s, v = np.linalg.svd(matrix)
    best = np.linalg.norm(matrix - (u[:, :2] * s[:2]) @ v[:2])
    workers, errors = _Workers('powersgd(2)', [(30, 20)], feeds=False), []
    for _ in range(30):
      [total] = workers.step(gradients)
      errors.append(np.linalg.norm(matrix - total))
      # The factors alone are kept, as if all had been sent.
      for kept in workers.kept:
        kept[0].factor.assign(np.linalg.qr(matrix.T @ total)[0][:, :2])
    self.assertLess(errors[-1], 1.02 * best)
    self.assertGreater(errors[0], 1.05 * best)

  def test_columns_that_gave_nothing_begin_anew(self):
    workers = _Workers('powersgd(2)', [(30, 20)])
    zeros = np.zeros([30, 20], np.float32)
    [total] = workers.step([[zeros], [zeros]])
    self.assertAllEqual(total, zeros)
    self.assertAllEqual(
      workers.kept[0][0].factor, gradient_state.first_factor((30, 20), 2)
    )
    [gradients] = [_gradients(2, [(30, 20)])]
    [total] = workers.step(gradients)
    self.assertGreater(np.abs(total).max(), 0.1)


class SpecialValuesTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(method=_METHODS, odd=(np.nan, np.inf, -np.inf))
  def test_what_is_not_finite_arrives_and_leaves_nothing(self, method, odd):
    workers = _Workers(method, _SHAPES)
    workers.step(_gradients(2, _SHAPES))
    before = [
      [v.numpy() for k in kept if k is not None for v in k.variables()]
      for kept in workers.kept
    ]
    gradients = _gradients(2, _SHAPES, 1)
    gradients[1][0][3, 7] = odd
    sums = workers.step(gradients)
    self.assertFalse(np.isfinite(sums[0]).all())
    after = [
      [v.numpy() for k in kept if k is not None for v in k.variables()]
      for kept in workers.kept
    ]
    # Also of variables whose own sums are finite: the step is left out.
    for a, b in zip(before, after, strict=True):
      for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
    for total in workers.step(_gradients(2, _SHAPES, 2)):
      self.assertTrue(np.isfinite(total).all())


class OrthogonalisedTest(tf.test.TestCase, parameterized.TestCase):
  @hypothesis.settings(deadline=None, max_examples=30)
  @hypothesis.given(st.integers(0, 10**6), st.integers(1, 6))
  def test_columns_of_length_one(self, seed, rank):
    random = np.random.default_rng(seed)
    scales = 10.0 ** random.uniform(-15, 15, rank)
    matrix = (random.normal(size=[40, rank]) * scales).astype(np.float32)
    basis = compressors.orthogonalised(matrix)
    self.assertAllClose(basis.T @ basis, np.eye(rank), 0, 1e-9)
    # They span the same.
    self.assertAllClose(
      basis @ (basis.T @ (matrix / scales)), matrix / scales, 0, 1e-5
    )

  def test_a_column_in_the_plane_of_others_is_zeros(self):
    matrix = np.random.default_rng(1).normal(size=[40, 3]).astype(np.float32)
    matrix[:, 1] = 5 * matrix[:, 0]
    basis = compressors.orthogonalised(matrix)
    self.assertAllEqual(basis[:, 1], np.zeros(40))
    self.assertAllClose(basis.T @ basis, np.diag([1, 0, 1]), 0, 1e-9)
    self.assertAllEqual(
      compressors.orthogonalised(np.zeros([4, 2])), np.zeros([4, 2])
    )

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_not_finite(self, odd):
    matrix = np.ones([5, 2])
    matrix[3, 0] = odd
    self.assertFalse(np.isfinite(compressors.orthogonalised(matrix)).all())


class FeedbackTest(tf.test.TestCase, parameterized.TestCase):
  """Small gradients beside large ones that come and go."""

  def _sent(self, method, scale, feeds):
    """The share of the small gradients that has arrived after many steps."""
    shape, steps = (32, 16), 200
    workers = _Workers(method, [shape], feeds=feeds)
    random = np.random.default_rng(0)
    small = np.full(shape, 0.01, np.float32)
    arrived, large = np.zeros(shape), np.zeros(shape, np.float32)
    for step in range(steps):
      # What it adds in one step it takes away in the next.
      large = -large
      if step % 2 == 0:
        large[:, :8] = scale * random.normal(size=[32, 8])
      arrived += workers.step([[small + large], [small - large / 2]])[0]
    return arrived[:, 8:].mean() / (2 * steps * small[0, 0])

  @tiers.parameters(*_LARGE)
  def test_nothing_is_lost_for_ever(self, method, scale):
    self.assertAllClose(self._sent(method, scale, feeds=True), 1, atol=0.15)

  @tiers.parameters(*_LARGE)
  def test_without_feedback_it_is(self, method, scale):
    """The mutation: what is left is forgotten."""
    self.assertLess(self._sent(method, scale, feeds=False), 0.7)


class GradientStateTest(tf.test.TestCase):
  def test_of_each_variable_one_that_goes_with_it(self):
    state = gradient_state.GradientState(virtual_devices.name(0))
    power = compression_lib.parse('powersgd(2)')
    one, other = tf.Variable(tf.zeros([9, 8])), tf.Variable(tf.zeros([9, 8]))
    kept = state.of(one, power)
    self.assertIs(state.of(one, power), kept)
    self.assertIsNot(state.of(other, power), kept)
    self.assertEqual(kept.rest.shape, [9, 8])
    self.assertEqual(kept.factor.shape, [8, 2])
    del one
    state.of(tf.Variable(tf.zeros([2])), compression_lib.parse('int8'))
    self.assertLen(state._kept, 2)

  def test_names(self):
    variables = [tf.Variable(0.0, name=n) for n in ('a', 'b', 'a', 'a')]
    self.assertEqual(
      list(gradient_state.names(variables)), ['a:0', 'b:0', 'a:0#2', 'a:0#3']
    )


if __name__ == '__main__':
  tf.test.main()
