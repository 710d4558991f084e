"""docs/data_sources.md: two workers read each example once in each epoch."""

import re

from absl.testing import absltest, parameterized

from benchmarks import processes
from tests.integration import pages

_PAGE = 'docs/data_sources.md'
_EXAMPLES, _EPOCHS = 19, 2

# Example i has the label 2 ** i. Of all sums of 19 labels, only the sum of 19
# different ones is 2 ** 19 - 1.
_DATA = f"""
import numpy as np
x = np.random.default_rng(1).normal(size=[{_EXAMPLES}, 3]).astype('float32')
y = 2.0 ** np.arange({_EXAMPLES}, dtype='float32')[:, None]
"""
_SAVE = {
  'tensorflow_datasets': """
import tensorflow_datasets as tfds
features = {
  name: tfds.features.Tensor(shape=array.shape[1:], dtype=np.float32)
  for name, array in (('x', x), ('y', y))
}
tfds.dataset_builders.store_as_tfds_dataset(
  name='numbers', version='1.0.0', data_dir='.',
  features=tfds.features.FeaturesDict(features),
  split_datasets={'train': [(i, {'x': x[i], 'y': y[i]}) for i in range(len(x))]},
)
""",
  'datasets': """
import datasets
datasets.Dataset.from_dict({'x': x, 'y': y}).save_to_disk('numbers')
""",
  'grain': "np.savez('numbers.npz', x=x, y=y)",
}
# The mean of 19 k labels, times 19, must be 2 ** 19 - 1, which is a prime.
_WATCH = ("'mse')", "'mse', metrics=[lambda label, _: label])")
_REPORT = (
  'verbose=0)\n',
  "verbose=0)\nhistory.history.pop('loss')\n[means] = history.history.values()\n"
  "print('means', *means, 'steps', int(model.optimizer.iterations.numpy()))\n",
)


class DataSourcesTest(parameterized.TestCase):
  def _run(self, package, title, *changes):
    """Returns each worker's means of the labels per epoch, and its step counts."""
    program = pages.write(
      self, _PAGE, title, [package], [_WATCH, _REPORT, *changes]
    )
    processes.run_python(
      '-c', _DATA + _SAVE[package], cwd=program.parent, is_checked=True
    )
    reports = re.findall(r'means (.*) steps (\d+)', pages.run(program))
    self.assertLen(reports, 2)
    self.assertEqual(reports[0], reports[1])
    means, steps = reports[0]
    return [float(mean) for mean in means.split()], int(steps)

  @parameterized.parameters(
    ('tensorflow_datasets', 'from_tfds.py'),
    ('datasets', 'from_hugging_face.py'),
    ('grain', 'from_grain.py'),
  )
  def test_each_example_is_read_once_per_epoch(self, package, title):
    means, steps = self._run(package, title)
    sums = [round(mean * _EXAMPLES) for mean in means]
    self.assertEqual(sums, [2**_EXAMPLES - 1] * _EPOCHS)
    # Workers have 10 and 9 examples, in batches of 4. No example is read twice.
    self.assertEqual(steps, _EPOCHS * 3)

  def test_examples_read_by_all_workers_are_detected(self):
    change = 'slice(context.input_pipeline_id, None,', 'slice(0, None, 1 or'
    _, steps = self._run('grain', 'from_grain.py', change)
    self.assertEqual(steps, _EPOCHS * 5)


if __name__ == '__main__':
  absltest.main()
