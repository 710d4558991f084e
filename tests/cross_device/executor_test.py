"""The executor follows a schedule exactly, even a wrong one."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import replicas
from tf_strategies import errors
from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.collectives.algorithms.direct import direct_all_reduce
from tf_strategies.collectives.layout import plan_layout
from tf_strategies.cross_device import executor

virtual_devices.configure()

WORLD_SIZE = 4
LENGTHS = (3, 97, 256)


def schedules():
  return {name: build(WORLD_SIZE) for name, build in ALGORITHMS.items()}


def run(schedule, layout=None):
  """Executes `schedule`. Returns inputs and results as [rank][tensor]."""
  layout = layout or plan_layout(
    LENGTHS, [4] * len(LENGTHS), schedule.num_chunks, split_above=0.0
  )
  by_tensor = [replicas.inputs('float32', (n,), WORLD_SIZE) for n in LENGTHS]
  arrays = [[t[rank] for t in by_tensor] for rank in range(WORLD_SIZE)]
  results = executor.execute(
    schedule,
    layout,
    [[tf.constant(a) for a in rank] for rank in arrays],
    replicas.devices(WORLD_SIZE),
  )
  return arrays, results


def is_exact(schedule):
  """Returns whether every tensor on every rank is the sum.

  The tests check this check.
  """
  arrays, results = run(schedule)
  expected = [replicas.exact(ranks) for ranks in zip(*arrays, strict=True)]
  return all(
    np.array_equal(result.numpy(), sum_)
    for rank in results
    for result, sum_ in zip(rank, expected, strict=True)
  )


def is_valid(schedule):
  try:
    schedule.validate()
  except errors.ScheduleError:
    return False
  return True


def changed(schedule, index, **changes):
  """Returns `schedule` with one transfer changed, or dropped if `changes` is empty."""
  transfers = list(schedule.transfers)
  transfer = transfers.pop(index)
  if changes:
    transfers.append(dataclasses.replace(transfer, **changes))
  return dataclasses.replace(schedule, transfers=tuple(transfers))


class MutationsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(*ALGORITHMS)
  def test_one_transfer_dropped(self, name):
    schedule = schedules()[name]
    for index in range(len(schedule.transfers)):
      with self.subTest(transfer=schedule.transfers[index]):
        self.assertFalse(is_exact(changed(schedule, index)))

  @parameterized.parameters(
    'ring', 'halving_doubling', 'hierarchical', 'direct'
  )
  def test_one_transfer_of_another_chunk_or_sender(self, name):
    # Another sender may already have the same sum. Then both checks must accept
    # it.
    schedule = schedules()[name]
    for index, transfer in enumerate(schedule.transfers):
      chunk = (transfer.chunk + 1) % schedule.num_chunks
      src = (transfer.src + 1) % WORLD_SIZE
      src = src if src != transfer.dst else (src + 1) % WORLD_SIZE
      for change in ({'chunk': chunk}, {'src': src}):
        with self.subTest(transfer=transfer, **change):
          mutant = changed(schedule, index, **change)
          self.assertEqual(is_exact(mutant), is_valid(mutant))


class ExecutorTest(tf.test.TestCase, parameterized.TestCase):
  @pytest.mark.smoke
  def test_wrong_layout_is_seen(self):
    schedule = direct_all_reduce(WORLD_SIZE)
    layout = plan_layout(
      LENGTHS, [4] * len(LENGTHS), schedule.num_chunks, split_above=0.0
    )
    moved = [
      dataclasses.replace(piece, start=piece.start + 1)
      if piece.start > 0
      else piece
      for piece in layout
    ]
    arrays, results = run(schedule, layout)
    expected = replicas.exact([rank[2] for rank in arrays])
    self.assertAllEqual(results[0][2], expected)
    with self.assertRaises((AssertionError, tf.errors.InvalidArgumentError)):
      _, results = run(schedule, moved)
      self.assertAllEqual(results[0][2], expected)

  @parameterized.parameters(
    ('int32', [-5, -4, -1, 0, 5], [-3, -2, -1, 0, 2]),
    ('uint8', [5, 254, 255, 0, 1], [2, 127, 127, 0, 0]),
    ('float32', [-5, 1, 0, 3, 2], [-2.5, 0.5, 0, 1.5, 1]),
    ('float16', [-5, 1, 0, 3, 65504], [-2.5, 0.5, 0, 1.5, 32752]),
    ('complex64', [-5, 1j, 0, 3, 2], [-2.5, 0.5j, 0, 1.5, 1]),
  )
  def test_divide(self, dtype, values, expected):
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    result = executor.divide(tf.constant(np.array(values, numpy_dtype)), 2)
    np.testing.assert_array_equal(
      result.numpy(), np.array(expected, numpy_dtype), strict=True
    )


class SumsInGraphsTest(tf.test.TestCase, parameterized.TestCase):
  """TensorFlow must not reorder the additions of a sum by their arrival."""

  @parameterized.parameters('direct', 'naive', 'auto')
  def test_large_sum_is_the_same_in_every_run(self, name):
    # Terms and sum exceed the memory that TensorFlow assumes for a logical CPU.
    size = 14_000_000
    op = replicas.OPS[name]()
    names = replicas.devices(3)
    ranks = []
    for rank, device in enumerate(names):
      with tf.device(device):
        noise = tf.random.stateless_normal([size], [rank, 0])
        ranks.append(tf.Variable(noise * 10.0**rank))

    @tf.function
    def step():
      value = replicas.on_devices(ranks, names)
      with tf.device(names[1]):
        return op.reduce(replicas.SUM, value, value).values[1] + 0.0

    expected = (ranks[0].numpy() + ranks[1].numpy()) + ranks[2].numpy()
    for _ in range(3):
      np.testing.assert_array_equal(step().numpy(), expected)


if __name__ == '__main__':
  tf.test.main()
