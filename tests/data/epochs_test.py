"""In runs of several epochs, the order depends only on the seed."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers
from tests.data import formula
from tf_strategies import errors
from tf_strategies.checkpoint import position

_N = 23


def _augment(images, labels, seed):
  return images + tf.random.stateless_uniform(tf.shape(images), seed), labels


class RunTest(formula.DataTestCase):
  def run_from(self, source, start, epochs, *, steps=None, **changes):
    """Returns the augmented batches of a run from a position on."""
    given = {'global_batch_size': 5, 'seed': 3, 'augment_fn': _augment}
    dataset = self.make(
      source,
      start=start,
      epochs=epochs,
      steps_per_epoch=steps,
      **{**given, **changes},
    )
    batches = list(dataset.as_numpy_iterator())
    self.assertLen(batches, int(dataset.cardinality()))
    return batches

  def labels(self, *args, **kwargs):
    return [y.tolist() for _, y in self.run_from(*args, **kwargs)]

  @parameterized.parameters(('arrays', None), ('files', 6))
  def test_each_pass_has_every_example_once_in_a_new_order(self, kind, buffer):
    source = self.source(kind, _N)
    batches = self.labels(source, (0, 0), 3, shuffle_buffer=buffer)
    passes = np.concatenate(batches).reshape([3, _N])
    for one in passes:
      self.assertAllEqual(np.sort(one), range(_N))
    self.assertLen({tuple(one) for one in passes}, 3)
    other = self.labels(source, (0, 0), 1, shuffle_buffer=buffer, seed=4)
    self.assertNotAllEqual(np.concatenate(other), passes[0])

  @tiers.parameters(
    tiers.smoke('arrays', {}),
    ('files', {'steps': 7, 'cache': 'memory'}),
    ('arrays', {'steps': 7, 'drop_remainder': True}),
    ('files', {'steps': 2, 'drop_remainder': True, 'shuffle_buffer': 6}),
  )
  def test_resumed_run_sees_and_augments_the_same(self, kind, changes):
    source = self.source(kind, _N)
    whole = self.run_from(source, (0, 0), 3, **changes)
    steps = len(whole) // 3
    tf.random.set_seed(5)
    for epoch, step in ((0, 1), (1, 0), (2, steps - 1), (3, 0)):
      start = position.Position(epoch=epoch, step=step)
      rest = self.run_from(source, start, 3, **changes)
      for one, other in zip(whole[epoch * steps + step :], rest, strict=True):
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(one[0], other[0])

  def test_order_does_not_depend_on_other_iterators(self):
    dataset = self.make(formula.arrays(_N), seed=5, epochs=1)
    orders = []
    for _ in range(2):
      next(iter(dataset))
      orders.append(np.concatenate([y for _, y in dataset]))
    self.assertAllEqual(*orders)

  @parameterized.parameters((2, True), (13, False), (13, True))
  def test_all_examples_are_used_equally_often(self, steps, drop_remainder):
    source = formula.arrays(_N)
    changes = {'steps': steps, 'drop_remainder': drop_remainder}
    for epochs in (1, 8):
      batches = self.labels(source, (0, 0), epochs, **changes)
      self.assertLen(batches, epochs * steps)
      counts = np.bincount(np.concatenate(batches), minlength=_N)
      self.assertLessEqual(counts.max() - counts.min(), 1)
      if drop_remainder:
        self.assertEqual({len(batch) for batch in batches}, {5})

  def test_order_does_not_depend_on_the_length_of_epochs(self):
    source = formula.arrays(_N)
    passes = self.labels(source, (0, 0), 6)
    self.assertLen(passes, 6 * 5)
    for steps in (2, 5, 10):
      found = self.labels(source, (0, 0), 30 // steps, steps=steps)
      self.assertEqual(found, passes)
    full = self.labels(
      source, (0, 0), 1, steps=6 * _N // 5, drop_remainder=True
    )
    in_a_row = np.concatenate(passes)
    self.assertAllEqual(np.concatenate(full), in_a_row[: len(full) * 5])

  def test_workers_take_batches_in_turn(self):
    whole = self.labels(formula.arrays(_N), (1, 2), 3)
    for i in range(3):
      context = tf.distribute.InputContext(3, i)
      found = self.labels(formula.arrays(_N), (1, 2), 3, input_context=context)
      self.assertEqual(found, whole[i::3])

  @parameterized.named_parameters(
    ('seed', {'epochs': 1, 'seed': None}, 'seed=None'),
    (
      'replicas',
      {'epochs': 1, 'input_context': tf.distribute.InputContext(2, 0, 4)},
      'num_replicas_in_sync=4.*experimental_distribute_dataset',
    ),
    ('start', {'start': (0, 1)}, 'without epochs'),
    ('evaluation', {'epochs': 1, 'training': False}, 'training=False'),
    ('before', {'epochs': 1, 'start': (-1, 0)}, 'start epoch=-1'),
    ('no_steps', {'epochs': 1, 'steps_per_epoch': 0}, 'per_epoch=0'),
    ('batch', {'epochs': 1, 'drop_remainder': True}, 'no full batch of 64'),
  )
  def test_invalid_options_are_refused(self, options, message):
    given = {'global_batch_size': 64, 'seed': 1, **options}
    with self.assertRaisesRegex(errors.Error, message):
      self.make(formula.arrays(_N), **given)


if __name__ == '__main__':
  tf.test.main()
