"""Programs give the same results if three replicas share their rows.

Each case is a function of a batch. It runs unchanged, and planned for replicas
with unequal numbers of rows, which may be zero. Outputs must be equal. Cases in
`_BY_ROWS` must not gather rows.
"""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tf_case, virtual_devices
from tests.spmd.replicas import flat as _flat
from tests.spmd.replicas import run
from tf_strategies import errors
from tf_strategies.spmd import emit, kinds, pieces, plan, program, row_sharing

virtual_devices.configure()

_SHAPE = (5, 4, 6)


def _arrays():
  rng = np.random.default_rng(0)
  return rng.normal(size=_SHAPE).astype('f4'), rng.integers(0, 6, 5)


def _gradient(function):
  """Returns a case with gradients of a sum of squares, by the inputs and a weight."""

  def case(x, labels):
    weight = tf.constant(np.linspace(-1, 1, 36, dtype='f4').reshape(6, 6))
    with tf.GradientTape() as tape:
      tape.watch([x, weight])
      loss = tf.reduce_sum(tf.square(function(x, weight, labels)))
    return tape.gradient(loss, [x, weight], unconnected_gradients='zero')

  return case


def _columns_first(x, weight, labels):
  # TensorFlow does not know that both have two columns.
  two, also_two = (tf.compat.v1.placeholder_with_default(2, []) for _ in 'ab')
  first, second = x[:, :two], (x @ weight)[:, :also_two]
  return tf.transpose(first, [1, 0, 2]) - tf.transpose(second, [1, 0, 2])


def _loop(x, labels):
  def turn(i, state, kept):
    state = tf.tanh(state + x[:, i])
    return i + 1, state, kept.write(i, state)

  kept = tf.TensorArray(tf.float32, 4)
  start = tf.zeros([tf.shape(x)[0], 6])
  _, state, kept = tf.while_loop(lambda i, *_: i < 4, turn, [0, start, kept])
  return state, kept.stack()


def _rows_into_zeros(x, labels):
  """Writes rows into zeros, as gradients of a partly unused loop output do."""
  given = tf.TensorArray(tf.float32, 4).unstack(tf.transpose(x, [1, 0, 2]))
  kept = tf.TensorArray(tf.float32, 4)
  kept = kept.unstack(tf.zeros([4, tf.shape(x)[0], 6]))
  return tf.while_loop(
    lambda i, _: i < 3,
    lambda i, kept: (i + 1, kept.write(i, given.read(i))),
    [0, kept],
  )[1].stack()


def _list_of_rows(x, labels):
  """Writes, gathers and scatters rows without a loop."""
  kept = tf.TensorArray(tf.float32, 3, clear_after_read=False)
  for i in range(3):
    kept = kept.write(i, x[:, i] * (i + 1.0))
  others = tf.TensorArray(tf.float32, 5, clear_after_read=False)
  others = others.scatter([3, 1], kept.gather([2, 0]))
  others = others.write(4, x[:, 3])
  others = others.scatter([0, 2], tf.stack([x[:, 1], x[:, 2]]))
  return kept.gather([2, 0]), others.stack(), others.read(1)


def _list_of_sums(x, labels):
  """Puts whole elements and sums over rows into the same list."""
  kept = tf.TensorArray(tf.float32, 3)
  kept = kept.write(0, 5.0).write(1, tf.reduce_sum(x)).write(2, 7.0)
  zeros = tf.TensorArray(tf.float32, 2).unstack(tf.zeros([2]))
  zeros = zeros.write(0, tf.reduce_mean(x))
  ones = tf.TensorArray(tf.float32, 2).unstack(tf.ones([2]))
  ones = ones.write(0, tf.reduce_mean(x))
  return [tf.reduce_sum(v.stack()) for v in (kept, zeros, ones)]


def _of_unknown_rank(x, labels):
  copy = tf.numpy_function(np.copy, [x], tf.float32)
  return tf.tile(copy, [1, 2, 1]), tf.slice(copy, [0, 1, 0], [-1, 2, -1])


def _rank_of_rows(x, labels):
  """Compares each row with every other row, as contrastive losses do."""
  flat = tf.reshape(x, [-1, 24])
  alike = tf.matmul(flat, flat, transpose_b=True)
  return tf.reduce_logsumexp(alike, 1), tf.argsort(flat[:, 0])


# Each replica computes these from its rows; only sums and extrema are
# exchanged.
_BY_ROWS = {
  'beside_a_vector_of_rows': lambda x, y: (
    x * tf.cast(y, tf.float32)[:, None, None]
  ),
  'known_to_vectorized_map': lambda x, y: tf.math.special.dawsn(x),
  'extrema': lambda x, y: (tf.reduce_max(x), tf.reduce_min(x, 0)),
  'all_and_any': lambda x, y: (tf.reduce_all(x > 0), tf.reduce_any(x > 1.5, 0)),
  'variance': lambda x, y: tf.math.reduce_variance(x, [0, 1]),
  'own_rows': lambda x, y: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], x.dtype),
  'split_axes': lambda x, y: tf.reshape(
    tf.reshape(x, [-1, 24]), [tf.shape(x)[0], 2, 12]
  ),
  'transposed': lambda x, y: tf.transpose(x, [1, 0, 2])[::-1],
  'slices': lambda x, y: (x[:, 1:3], x[..., -1], x[:, None, 0]),
  # A replica with one row keeps the axis of the rows.
  'squeezed_by_length': lambda x, y: tf.squeeze(x),
  'stacked': lambda x, y: tf.unstack(tf.stack([x, -x], 1), axis=1),
  'tiled': lambda x, y: tf.concat(
    [tf.tile(tf.ones([1, 1, 6]), [tf.shape(x)[0], 1, 1]), x], 1
  ),
  # TensorFlow does not know how many columns there are.
  'columns_of_tiled': lambda x, y: tf.shape(
    tf.tile(tf.unique([3, 3, 5])[0][None], [tf.shape(x)[0], 1])
  ),
  'filled': lambda x, y: x + tf.fill([tf.shape(x)[0], 1, 1], 2.0),
  'taken_by_row': lambda x, y: tf.gather(x, y % 4, axis=1, batch_dims=1),
  'softmax': lambda x, y: (tf.nn.softmax(x), tf.nn.top_k(x[:, 0], 2)),
  'cross_entropy': lambda x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(
    y, x[:, 0]
  ),
  'einsum': lambda x, y: tf.einsum('bij,bkj->bik', x, x),
  'convolved': lambda x, y: tf.nn.conv2d(
    x[..., None], tf.ones([2, 2, 1, 3]), 1, 'SAME'
  ),
  'pooled': lambda x, y: tf.nn.max_pool2d(x[..., None], 2, 2, 'VALID'),
  'counted': lambda x, y: tf.math.unsorted_segment_sum(x, y, 6),
  'loop': _loop,
  'rows_into_zeros': _rows_into_zeros,
  'list_of_rows': _list_of_rows,
  'large_constants': lambda x, y: (
    y * 123456789012347 % 1000003,
    tf.cast(tf.shape(x)[0], tf.int64) * 123456789012347 + y,
    tf.shape(x)[0] * 2**20 * tf.constant(2**11) % 1000003
    + tf.cast(y, tf.int32),
  ),
  'rows_chosen': lambda x, y: tf.raw_ops.Select(condition=y > 2, x=x, y=-x),
  'short_integers': lambda x, y: tf.cast(
    tf.reduce_sum(tf.cast(y + 60, tf.uint8), 0), tf.float32
  ),
  'checked': lambda x, y: tf.debugging.check_numerics(x, 'x') + 1.0,
  # Accuracy metrics compute this, which needs a bitcast.
  'argmax_of_keras': lambda x, y: keras.ops.argmax(x, -1),
  'diagonals': lambda x, y: (
    tf.linalg.diag(x[:, 0]),
    tf.linalg.diag_part(tf.matmul(x, x, transpose_b=True)),
  ),
  'gradient_of_trace': _gradient(
    lambda x, w, y: tf.linalg.trace(tf.matmul(x @ w, x @ w, transpose_b=True))
  ),
  'list_of_sums': _list_of_sums,
  'gradient_of_list': _gradient(lambda x, w, y: _list_of_rows(x @ w, y)[1]),
  'branch': lambda x, y: tf.cond(
    tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x - 1.0
  ),
  'gradient_of_norm': _gradient(
    lambda x, w, y: (
      (x - tf.reduce_mean(x, 0)) / tf.norm(x, axis=2, keepdims=True)
    )
  ),
  'gradient_of_scale': _gradient(lambda x, w, y: x * w[0] + w[1, :1]),
  'gradient_of_pieces': _gradient(
    lambda x, w, y: tf.concat([x[:, :1] * 2.0, tf.reshape(x, [-1, 4, 6])], 1)
  ),
  'gradient_of_cross_entropy': _gradient(
    lambda x, w, y: tf.nn.softmax_cross_entropy_with_logits(
      tf.tile(tf.reshape(tf.one_hot(y, 6), [-1, 1, 6]), [1, 4, 1]), x @ w
    )
  ),
  'gradient_of_look_up': _gradient(lambda x, w, y: tf.gather(w, y)),
  'gradient_of_loop': _gradient(lambda x, w, y: _loop(x @ w, y)[1]),
  'clipped_by_hand': lambda x, y: tf.clip_by_global_norm(
    [tf.reduce_sum(x, 0), tf.reduce_sum(x, [0, 1])], 1.0
  )[0],
}
# Cases of `_BY_ROWS` whose shares cannot be combined: they exchange other values than
# sums, or their results depend on the number of rows.
_NOT_COMBINED = (
  'all_and_any',
  'branch',
  'clipped_by_hand',
  'columns_of_tiled',
  'extrema',
  'gradient_of_norm',
  'large_constants',
  'list_of_sums',
  'short_integers',
  'squeezed_by_length',
  'variance',
)
# Cases that need all rows at once.
_WHOLE = {
  'gradient_of_columns': _gradient(_columns_first),
  'first_row': lambda x, y: x[0],
  # TensorFlow does not know the rank.
  'squeezed': lambda x, y: tf.nn.softmax(tf.squeeze(x[:, :1])),
  'unknown_rank': _of_unknown_rank,
  'reversed_rows': lambda x, y: x[::-1],
  'rows_after_rows': lambda x, y: tf.concat([x, x + 1.0], 0),
  'product_of_rows': _rank_of_rows,
  'loop_over_all_rows': lambda x, y: tf.while_loop(
    lambda i, s: i < 3,
    lambda i, s: (i + 1, s + x / tf.reduce_sum(tf.abs(s + x), 0)),
    [0, tf.zeros_like(x)],
  )[1],
  'no_rule': lambda x, y: tf.linalg.qr(tf.reshape(x, [-1, 6])).r ** 2,
  'unique': lambda x, y: tf.unique(y)[0],
  'positions': lambda x, y: (
    x + tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None, None]
  ),
}
# The rows of three replicas, and the number of nodes from which a block is a
# function.
_ROWS = {
  'uneven': ((2, 2, 1), 500),
  'first_empty': ((0, 1, 4), 500),
  'functions': ((0, 2, 3), 1),
}


def _powers(function, *specs):
  """Returns the powers of rows in the results that workers would compute."""
  graph = (
    tf.function(lambda *args: _flat(function(*args)), autograph=False)
    .get_concrete_function(*specs)
    .graph
  )
  return row_sharing.powers(graph, len(specs), graph.outputs)


_SPECS = tf.TensorSpec([None, *_SHAPE[1:]]), tf.TensorSpec([None], tf.int64)


class RulesTest(tf_case.TestCase):
  @parameterized.named_parameters(
    *(
      (f'{name}_{which}', function, *rows)
      for name, function in {**_BY_ROWS, **_WHOLE}.items()
      for which, rows in _ROWS.items()
    )
  )
  def test_replicas_equal_one_device(self, function, rows, many):
    for name in ('_MANY_NODES', '_MOST_INLINED'):
      self.enter_context(mock.patch.object(emit, name, many))
    arrays = _arrays()
    want = _flat(function(*map(tf.constant, arrays)))
    found, exchanges = run(function, arrays, rows)
    for expected, result in zip(want, found, strict=True):
      self.assertAllClose(expected, result, 1e-5, 1e-5)
    if function in _BY_ROWS.values():
      # Only whole results and extrema may be gathered.
      self.assertLessEqual(exchanges.count('gather'), len(want))

  @parameterized.named_parameters(*_BY_ROWS.items(), *_WHOLE.items())
  def test_shares_are_combined_or_refused(self, function):
    if function in (*_WHOLE.values(), *map(_BY_ROWS.get, _NOT_COMBINED)):
      with self.assertRaises(plan.NeedsExchangeError):
        _powers(function, *_SPECS)
    else:
      self.assert_shared(function, _powers(function, *_SPECS))

  def test_mean_over_rows_of_unknown_length_is_not_shared(self):
    # Each worker may have read rows of another length.
    self.assertEqual(_powers(tf.reduce_mean, tf.TensorSpec([None, 4])), [0])
    with self.assertRaises(plan.NeedsExchangeError):
      _powers(tf.reduce_mean, tf.TensorSpec([None, None]))

  @parameterized.parameters(
    lambda x, y, n: tf.tensor_scatter_nd_add(
      tf.ones([6]), y[:, None], x[:, 0, 0]
    ),
    lambda x, y, n: tf.reduce_sum(tf.zeros([n + 1]) + 1.0),
    lambda x, y, n: tf.reduce_sum(tf.zeros([n, n]) + 1.0),
    lambda x, y, n: tf.reduce_sum(tf.ones_like(tf.range(n))),
    lambda x, y, n: tf.cast(tf.cast(n, tf.bool), tf.float32),
    lambda x, y, n: tf.reduce_sum(x[:, :, :n]),
    lambda x, y, n: tf.reduce_sum(tf.tile(x, [1, n, 1])),
    lambda x, y, n: tf.reduce_sum(tf.roll(x, n, 1)),
    lambda x, y, n: tf.reduce_mean(
      tf.math.unsorted_segment_sum(x[:, 0, 0], y, n)
    ),
    lambda x, y, n: tf.reduce_sum(tf.reduce_mean(tf.squeeze(x), 0)),
  )
  def test_other_uses_of_the_row_count_are_not_shared(self, function):
    with self.assertRaises(plan.NeedsExchangeError):
      _powers(lambda x, y: function(x, y, tf.shape(x)[0]), *_SPECS)

  def assert_shared(self, function, powers):
    """Checks that sums and weighted means over shares equal the whole result."""
    arrays = _arrays()
    whole = [t.numpy() for t in _flat(function(*map(tf.constant, arrays)))]
    parts = [
      _flat(function(*(tf.constant(a[rows]) for a in arrays)))
      for rows in (slice(0, 2), slice(2, 4), slice(4, 5))
    ]
    for want, power, *found in zip(whole, powers, *parts, strict=True):
      if any(t.shape != want.shape for t in found):
        continue  # Rows are not combined.
      values = np.array([t.numpy() for t in found])
      if not power and values.dtype.kind == 'f':
        values = values * np.array([2, 2, 1]).reshape([3] + [1] * want.ndim) / 5
      elif not power:
        values = values[:1]
      self.assertAllClose(want, values.sum(0), 1e-5, 1e-5)

  def test_python_function_is_called_once(self):
    calls = []

    def note(value):
      calls.append(value)
      return np.float32(len(calls))

    def case(x, y):
      number = tf.numpy_function(note, [tf.reduce_sum(x)], tf.float32)
      return x * tf.ensure_shape(number, [])

    x, y = _arrays()
    found, _ = run(case, (x, y), (2, 2, 1))
    self.assertLen(calls, 1)
    self.assertAllClose(calls, [x.sum()], 1e-4)
    self.assertAllClose(found[0], x)

  def test_concatenated_rows_of_a_list_are_refused(self):
    def case(x, y):
      kept = tf.TensorArray(tf.float32, 2, element_shape=[None, *_SHAPE[1:]])
      return kept.write(0, x).write(1, 2.0 * x).concat()

    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'TensorListConcatV2.*take tf.stack'
    ):
      run(case, _arrays(), (2, 2, 1))

  def test_equal_operations_are_built_once(self):
    variable = tf.Variable(2.0)

    @tf.function
    def step(x):
      before = variable * x + variable * x + tf.random.normal([])
      variable.assign_add(x)
      return before + variable * x + tf.random.normal([])

    graph = step.get_concrete_function(tf.TensorSpec([])).graph
    nodes = program.flatten(graph, graph.inputs, graph.outputs).nodes
    found = [node.type for node in nodes]
    types = ('ReadVariableOp', 'Mul', 'RandomStandardNormal')
    self.assertEqual([found.count(t) for t in types], [2, 2 + 2, 2])


_COUNT = 3
_SLOT = (5, 2)  # Three pieces of four elements; the last one is padded.
_MATRIX = np.arange(10, dtype='f4').reshape(_SLOT)


class _Sharded:
  """A variable and its pieces."""

  is_part = is_single = False
  shard = kinds.Shard(_COUNT)

  def __init__(self, value):
    self.variable = tf.Variable(value, name='slot')
    self.pieces = [
      tf.Variable(pieces.cut(self.variable, self.shard, index))
      for index in range(_COUNT)
    ]

  def handle(self, at):
    return self.pieces[at.replica].handle


CASES = {
  # The function, and its exchanges in any order.
  'reductions': (
    lambda x, slot: [
      tf.reduce_max(slot),
      tf.reduce_min(tf.exp(slot)),
      tf.reduce_mean(slot + 1.0),
      tf.reduce_all(slot < 100.0),
      tf.reduce_any(slot > 100.0),
      tf.nn.l2_loss(slot),
      tf.reduce_prod(slot, [0, 1], keepdims=True),
    ],
    {'add', 'gather'},
  ),
  'repeated': (
    lambda x, slot: [
      slot * tf.constant([2.0, 3.0]),  # A vector beside a matrix.
      slot[0] * tf.constant(_MATRIX),
      tf.reshape(slot, [-1]) * 2.0,
      tf.cast(slot, tf.float64) * tf.cast(tf.shape(slot)[0], tf.float64),
    ],
    {'join'},
  ),
  'rows_beside_a_shard': (
    lambda x, slot: [
      x @ slot,
      tf.reduce_sum(x @ slot) + tf.reduce_sum(tf.square(slot)),
      tf.reduce_sum(x, 0)[:, None] + slot,
    ],
    {'add', 'join', 'gather'},
  ),
}


class ShardsTest(tf_case.TestCase):
  @parameterized.product(
    case=tuple(CASES), rows=((2, 2, 2), (0, 5, 1)), many=(1, 500)
  )
  def test_equals_one_device(self, case, rows, many):
    # A block with at least `many` nodes is a function.
    for name in ('_MANY_NODES', '_MOST_INLINED'):
      self.enter_context(mock.patch.object(emit, name, many))
    function, exchanges = CASES[case]
    rng = np.random.default_rng(3)
    x = rng.normal(size=(6, _SLOT[0])).astype('f4')
    value = rng.normal(size=_SLOT).astype('f4')
    found, recorded = run(function, [x], rows, [_Sharded(value)])
    expected = function(tf.constant(x), tf.Variable(value))
    for a, b in zip(found, expected, strict=True):
      self.assertAllClose(a, b, 1e-5, 1e-5)
    self.assertEqual(set(recorded), exchanges)

  @parameterized.parameters(
    lambda x, slot: tf.gather(slot, [0]),
    lambda x, slot: tf.while_loop(
      lambda i: i < 2, lambda i: [i + tf.cast(slot[0, 0], tf.int32)], [0]
    ),
  )
  def test_unsupported_use_of_a_sharded_variable_is_refused(self, function):
    slot, x = _Sharded(np.ones(_SLOT, 'f4')), np.ones((6, _SLOT[0]), 'f4')
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'shard_optimizer_state'
    ):
      run(function, [x], (2, 2, 2), [slot])


if __name__ == '__main__':
  tf.test.main()
