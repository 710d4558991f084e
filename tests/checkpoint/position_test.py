"""Where the data of a run continue."""

import tensorflow as tf
from absl.testing import absltest, parameterized

from tf_strategies.checkpoint.position import Position

# Functions that make data sets, in the tests: an op that runs when a module is
# imported fixes the devices of the process, of which other modules want eight.


def _range(count):
  return lambda: tf.data.Dataset.range(count)


def _unknown(count):
  """Returns a function that makes a dataset whose length TensorFlow cannot know."""
  return lambda: tf.data.Dataset.range(count).filter(lambda x: x >= 0)


class PositionTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('pass', _range(10), Position(4, 3), None, 3),
    ('epochs', _range(40), Position(2, 3), 10, 23),
    ('infinite', tf.data.Dataset.counter, Position(2, 3), 10, 23),
    ('unknown', _unknown(40), Position(2, 3), 10, 23),
    # Two passes and three batches.
    ('unknown_passes', _unknown(10), Position(2, 3), 10, 3),
    ('unknown_end_of_a_pass', _unknown(10), Position(2), 10, 0),
  )
  def test_iterates_from_there(self, make, position, steps, expected):
    self.assertEqual(int(next(position.iterate(make(), steps))), expected)

  def test_data_of_which_nothing_is_there(self):
    self.assertEmpty(list(Position(0, 3).iterate(_unknown(0)())))

  def test_order_and_json(self):
    positions = [Position(), Position(0, 7), Position(1), Position(1, 2)]
    self.assertEqual(sorted([*positions[2:], *positions[:2]]), positions)
    position = Position(1, 2, (3, 4))
    self.assertEqual(
      Position.from_json({**position.to_json(), 'settings': {}}), position
    )
    self.assertEqual(
      Position.from_json({'epoch': 1, 'step': 2}), Position(1, 2)
    )
    self.assertEqual(tuple(position), (1, 2))


if __name__ == '__main__':
  absltest.main()
