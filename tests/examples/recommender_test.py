"""The recommender learns tastes, and servers give the results of one device."""

import os
import re

import pytest
from absl.testing import absltest

from tests.examples import programs

_SMALL = ('--num_ratings=4000', '--num_users=200', '--num_movies=60')
_RESULT = re.compile(r'rmse (\S+); who always says the mean has (\S+)')


class RecommenderTest(absltest.TestCase):
  def _train(self, *flags, launcher=()):
    """Returns the error of the trained model, and of always predicting the mean."""
    directory = self.create_tempdir().full_path
    exported = os.path.join(directory, 'model.keras')
    program = programs.Program(
      'recommender',
      *_SMALL,
      f'--export={exported}',
      *flags,
      output=os.path.join(directory, 'output'),
      launcher=launcher,
      as_file=True,
    )
    self.addCleanup(program.kill)
    self.assertEqual(program.wait(), 0, program.output()[-5000:])
    self.assertIn('predicts the same on one device', program.output())
    return map(float, _RESULT.search(program.output()).groups())

  def test_learns_what_nobody_told_it(self):
    found, mean = self._train('--epochs=4')
    self.assertLess(found, 0.85 * mean)
    # Without training, the model is no better than the mean.
    barely, _ = self._train('--epochs=1', '--learning_rate=1e-6')
    self.assertGreater(barely, 0.95 * mean)

  @pytest.mark.soak
  def test_servers_train_what_one_device_trains(self):
    found, _ = self._train(
      '--epochs=2',
      '--strategy=parameter_server',
      '--mode=sync',
      launcher=('--num_workers=2', '--num_ps=2', '--chief'),
    )
    expected, _ = self._train('--epochs=2')
    self.assertAlmostEqual(found, expected, delta=2e-6)


if __name__ == '__main__':
  absltest.main()
