"""What every run of an elastic job ends with, whatever has happened to it."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.fault_tolerance import elastic_program


class ElasticCase(tf.test.TestCase, parameterized.TestCase):
  """What is true whatever has happened."""

  def assert_results(
    self,
    outcomes,
    epochs=elastic_program.EPOCHS,
    tolerance=2e-6,
    kind='plain',
    batch=elastic_program.BATCH,
  ):
    """Every worker ended as one device does, and all bit by bit alike."""
    want, history = elastic_program.uninterrupted(epochs, kind, batch)
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
      self.assertIsNotNone(outcome.value, f'worker {outcome.rank}')
      # Neither a step that is missing nor one that was applied twice.
      steps = epochs * -(-elastic_program.ROWS // batch)
      self.assertEqual(outcome.value['iterations'], steps)
      self.assertGreater(outcome.value['accuracy'], 0.97)
      pairs = zip(want, outcome.value['weights'], strict=True)
      most = max(np.abs(a - b).max() for a, b in pairs)
      print(f'{kind}, {steps} steps: weights of one device within {most:.1e}')
      self.assertLess(most, tolerance)
      for name, values in (outcome.value['history'] or {}).items():
        # One that came later knows the epochs since then: in whole.
        since = history[name][-len(values) :]
        self.assertAllClose(since, values, 0, 10 * tolerance, msg=name)
    for outcome in outcomes[1:]:
      for a, b in zip(
        outcomes[0].value['weights'], outcome.value['weights'], strict=True
      ):
        np.testing.assert_array_equal(a, b)
