"""What `TPURingStrategy` puts into the graph is the schedule, and only that."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers
from tests.strategies.tpu import double, program
from tf_strategies.collectives import (
  ALGORITHMS,
  Schedule,
  Transfer,
  ring_all_reduce,
)
from tf_strategies.collectives.permutation import permutation_rounds
from tf_strategies.strategies.tpu.permute import PermutingAllReduce

_SHAPES = {
  'float32': [[3, 5], [], [7], [2, 2, 2]],
  'bfloat16': [[4, 4], [1]],
  'float64': [[11]],
}
# Those that a TPU program can run.
_NAMED = [
  (name, name) for name, build in ALGORITHMS.items() if build(4).adds_up_once()
]


def create_variables(strategy, shapes=_SHAPES):
  with strategy.scope():
    return [
      tf.Variable(tf.ones(shape, dtype))
      for dtype, of_dtype in shapes.items()
      for shape in of_dtype
    ]


def train(variables, x):
  """A step of a training loop: gradients, one all-reduce, updates."""
  with tf.GradientTape() as tape:
    losses = [tf.reduce_sum(tf.cast(v, tf.float32)) ** 2 for v in variables]
    loss = tf.add_n(losses) * tf.reduce_sum(x)
  gradients = tape.gradient(loss, variables)
  context = tf.distribute.get_replica_context()
  summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
  for variable, gradient in zip(variables, summed, strict=True):
    variable.assign_sub(gradient)
  return loss


def traced_step(strategy, shapes=_SHAPES):
  variables = create_variables(strategy, shapes)
  x = np.ones([strategy.num_replicas_in_sync, 2], np.float32)
  return program.Program(
    program.trace(strategy, lambda x: train(variables, x), [x])
  )


def traced_sum(strategy, value, reduce_op=tf.distribute.ReduceOp.SUM):
  def step(x):
    return tf.distribute.get_replica_context().all_reduce(reduce_op, x)

  values = np.stack([value] * strategy.num_replicas_in_sync)
  return program.Program(program.trace(strategy, step, [values]))


class GraphTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.parameters(4, 2, 8, tiers.soak(32))
  def test_a_step_is_a_ring_a_dtype(self, num_replicas):
    strategy = double.create_strategy(num_replicas)
    step = traced_step(strategy)
    self.assertIsNone(step.mismatch(ring_all_reduce(num_replicas)))
    self.assertEmpty(step.sums)
    self.assertEqual(
      collections.Counter(op.get_attr('T').name for op in step.permutes),
      dict.fromkeys(_SHAPES, 2 * (num_replicas - 1)),
    )
    neighbours = [(r, (r + 1) % num_replicas) for r in range(num_replicas)]
    for permute in step.permutes:
      self.assertEqual(step.pairs(permute), neighbours)

  @tiers.named_parameters(*tiers.few(_NAMED, 'hierarchical'))
  def test_a_step_is_the_named_schedule(self, name):
    for num_replicas in (2, 6, 8):
      strategy = double.create_strategy(num_replicas, all_reduce=name)
      schedule = ALGORITHMS[name](num_replicas)
      self.assertEqual(strategy.schedule, schedule)
      step = traced_step(strategy)
      self.assertIsNone(step.mismatch(schedule))
      self.assertEmpty(step.sums)
      self.assertEqual(step.num_rounds, schedule.num_rounds)
      steps = sum(len(steps) for steps in permutation_rounds(schedule))
      self.assertLen(step.permutes, len(_SHAPES) * steps)

  def test_order_in_the_graph_is_the_schedules(self):
    strategy = double.create_strategy(4, all_reduce='tree')
    step = traced_sum(strategy, np.ones([8], np.float32))
    self.assertEqual(
      [step.pairs(op) for op in step.permutes],
      [[(1, 0), (3, 2)], [(2, 0)], [(0, 2)], [(0, 1), (2, 3)]],
    )

  def test_more_variables_take_no_more_permutes(self):
    few, many = (
      traced_step(double.create_strategy(4), {'float32': [[3]] * count})
      for count in (1, 40)
    )
    self.assertLen(many.permutes, len(few.permutes))

  @pytest.mark.smoke
  def test_a_function_of_the_world_size(self):
    def backwards(world_size):
      ring = ring_all_reduce(world_size)
      turned = [
        dataclasses.replace(
          t, src=world_size - 1 - t.src, dst=world_size - 1 - t.dst
        )
        for t in ring.transfers
      ]
      return dataclasses.replace(ring, transfers=tuple(turned))

    strategy = double.create_strategy(4, all_reduce=backwards)
    step = traced_step(strategy)
    self.assertIsNone(step.mismatch(backwards(4)))
    self.assertIsNotNone(step.mismatch(ring_all_reduce(4)))

  @pytest.mark.smoke
  def test_builtin_is_cross_replica_sum_alone(self):
    strategy = double.create_strategy(4, all_reduce='builtin')
    self.assertIsNone(strategy.schedule)
    step = traced_step(strategy)
    self.assertEmpty(step.permutes)
    self.assertLen(step.sums, sum(len(shapes) for shapes in _SHAPES.values()))

  def test_one_replica_moves_nothing(self):
    step = traced_step(double.create_strategy(1))
    self.assertEmpty(step.permutes)
    self.assertEmpty(step.sums)
    x = tf.ones([2])
    all_reduce = PermutingAllReduce(ring_all_reduce(1))
    self.assertIs(all_reduce(tf.distribute.ReduceOp.SUM, [x])[0], x)

  def test_some_cores_of_a_tpu(self):
    topology = tf.tpu.experimental.Topology(
      mesh_shape=[2, 2, 1, 1],
      device_coordinates=[[[x, y, 0, 0] for x in (0, 1) for y in (0, 1)]],
    )
    cores = tf.tpu.experimental.DeviceAssignment(
      topology, core_assignment=[[[0, 1, 0, 0]], [[1, 0, 0, 0]]]
    )
    strategy = double.create_strategy(4, device_assignment=cores)
    self.assertEqual(strategy.num_replicas_in_sync, 2)
    self.assertIsNone(traced_step(strategy).mismatch(ring_all_reduce(2)))

  def test_a_cond_has_the_permutes_in_its_branch(self):
    strategy = double.create_strategy(2)

    def step(x):
      context = tf.distribute.get_replica_context()
      return tf.cond(
        tf.constant(True) & (context.num_replicas_in_sync > 1),
        lambda: context.all_reduce('SUM', x),
        lambda: x,
      )

    graph = program.trace(strategy, step, [np.ones([2, 3], np.float32)])
    ops = [
      node.op
      for function in graph.as_graph_def().library.function
      for node in function.node_def
    ]
    self.assertEqual(ops.count('CollectivePermute'), 2)
    self.assertNotIn('CrossReplicaSum', ops)

  def test_sparse_gradients_go_tensorflows_way(self):
    strategy = double.create_strategy(4)
    with strategy.scope():
      table = tf.Variable(tf.ones([6, 2]))
      dense = tf.Variable(tf.ones([3]))

    def step(x):
      with tf.GradientTape() as tape:
        rows = tf.gather(table, [1, 1, 3])
        loss = tf.reduce_sum(rows) * tf.reduce_sum(dense) * tf.reduce_sum(x)
      gradients = tape.gradient(loss, [table, dense])
      self.assertIsInstance(gradients[0], tf.IndexedSlices)
      return tf.distribute.get_replica_context().all_reduce('SUM', gradients)

    step = program.Program(
      program.trace(strategy, step, [np.ones([4, 2], np.float32)])
    )
    self.assertLen(step.sums, 1)
    self.assertIsNone(step.mismatch(ring_all_reduce(4)))
    self.assertLen(step.permutes, 6)

  def test_an_aggregated_variable_is_all_reduced(self):
    strategy = double.create_strategy(4)
    with strategy.scope():
      mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
    step = program.Program(
      program.trace(
        strategy, lambda x: mean.assign(x), [np.arange(4, dtype=np.float32)]
      )
    )
    self.assertEmpty(step.sums)
    self.assertIsNone(step.mismatch(ring_all_reduce(4)))

  @pytest.mark.smoke
  def test_statistics_of_layers_get_a_mean(self):
    strategy = double.create_strategy(2)
    with strategy.scope():
      statistic = tf.Variable(0.0, trainable=False, dtype=tf.float32)
      weight = tf.Variable(0.0, dtype=tf.float32)
      counter = tf.Variable(0, trainable=False, dtype=tf.int64)
    self.assertEqual(statistic.aggregation, tf.VariableAggregation.MEAN)
    self.assertEqual(weight.aggregation, tf.VariableAggregation.NONE)
    self.assertEqual(counter.aggregation, tf.VariableAggregation.NONE)


class MutationTest(tf.test.TestCase, parameterized.TestCase):
  """A graph of a schedule with one thing wrong is told from the right one."""

  def mismatch_of(self, schedule, transfers):
    strategy = double.create_strategy(schedule.world_size)
    mutant = dataclasses.replace(schedule, transfers=tuple(transfers))
    self.assertNotEqual(mutant, schedule)
    double.use_schedule(strategy, mutant)
    step = traced_sum(strategy, np.ones([8], np.float32))
    self.assertNotEmpty(step.permutes)
    self.assertIsNone(step.mismatch(mutant))
    return step.mismatch(schedule)

  @parameterized.named_parameters(*_NAMED)
  def test_unaltered(self, name):
    schedule = ALGORITHMS[name](4)
    strategy = double.create_strategy(4)
    double.use_schedule(strategy, schedule)
    step = traced_sum(strategy, np.ones([8], np.float32))
    self.assertIsNone(step.mismatch(schedule))

  @parameterized.named_parameters(*_NAMED)
  def test_altered_target(self, name):
    schedule = ALGORITHMS[name](4)
    *others, last = schedule.transfers
    dst = next(r for r in range(4) if r not in (last.src, last.dst))
    altered = dataclasses.replace(last, dst=dst)
    taken = {(t.dst, t.chunk) for t in others if t.round == last.round}
    if (dst, last.chunk) in taken:
      # Two copies of a chunk to one rank would be a race: drop the other.
      others = [
        t
        for t in others
        if (t.round, t.dst, t.chunk) != (last.round, dst, last.chunk)
      ]
    self.assertIn(
      f'src={last.src}', self.mismatch_of(schedule, [*others, altered])
    )

  @parameterized.named_parameters(*_NAMED)
  def test_swapped_rounds(self, name):
    schedule = ALGORITHMS[name](4)
    other = {0: 1, 1: 0}
    swapped = [
      dataclasses.replace(t, round=other.get(t.round, t.round))
      for t in schedule.transfers
    ]
    self.assertIsNotNone(self.mismatch_of(schedule, swapped))

  @parameterized.named_parameters(*_NAMED)
  def test_dropped_transfer(self, name):
    schedule = ALGORITHMS[name](4)
    for dropped in (0, len(schedule.transfers) - 1):
      transfers = list(schedule.transfers)
      lost = transfers.pop(dropped)
      self.assertIn(str(lost), self.mismatch_of(schedule, transfers))

  def test_another_chunk(self):
    schedule = ring_all_reduce(4)
    first, *others = schedule.transfers
    altered = dataclasses.replace(first, chunk=(first.chunk + 1) % 4)
    self.assertIn(str(first), self.mismatch_of(schedule, [altered, *others]))

  @pytest.mark.smoke
  def test_adding_for_overwriting(self):
    schedule = ring_all_reduce(4)
    *others, last = schedule.transfers
    altered = dataclasses.replace(last, reduce=True)
    self.assertIn(str(altered), self.mismatch_of(schedule, [*others, altered]))

  @pytest.mark.smoke
  def test_no_permute_at_all(self):
    strategy = double.create_strategy(2, all_reduce='builtin')
    step = traced_sum(strategy, np.ones([8], np.float32))
    self.assertIn('no CollectivePermute', step.mismatch(ring_all_reduce(2)))

  def test_a_round_between_two_steps_of_one(self):
    """Steps of one round must not see each other's results."""
    exchange = Schedule(
      'exchange',
      2,
      1,
      (Transfer(0, 0, 1, 0, True), Transfer(0, 1, 0, 0, True)),
    )
    late = [exchange.transfers[0], Transfer(1, 1, 0, 0, True)]
    self.assertIn('round=1', self.mismatch_of(exchange, late))


if __name__ == '__main__':
  tf.test.main()
