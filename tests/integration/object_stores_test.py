"""docs/object_stores.md: files through TensorFlow, and copies with fsspec."""

import os
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest

import tf_strategies as tfs
from tests import virtual_devices
from tests.integration import pages

virtual_devices.configure()

_PAGE = 'docs/object_stores.md'


class CopiedRunTest(absltest.TestCase):
  def test_run_resumes_from_its_copies(self):
    program = pages.write(self, _PAGE, 'copied_run.py', ['fsspec'])
    here = program.parent
    store = here / 'store'

    def run(directory, store, epochs):
      output = pages.run(program, directory, f'file://{here}/{store}', epochs)
      reports = re.findall(r'from epoch (\d) to (.*)', output)
      self.assertLen(reports, 2)
      self.assertEqual(reports[0], reports[1])
      return int(reports[0][0]), reports[0][1]

    start, weights = run('whole', 'other', '3')
    self.assertEqual(start, 0)
    self.assertEqual(run('first', 'store', '2')[0], 0)
    copies = sorted(os.listdir(store))
    self.assertLen(copies, 2)
    shutil.rmtree(here / 'first')  # The machine is lost.
    self.assertEqual(run('second', 'store', '3'), (2, weights))
    # The copy of the last checkpoint was interrupted.
    [last] = set(os.listdir(store)) - set(copies)
    os.truncate(store / last / 'arrays.bin', 100)
    self.assertEqual(run('third', 'store', '3'), (2, weights))


class TensorFlowFileSystemTest(tf.test.TestCase):
  def _model(self, seed):
    keras.utils.set_random_seed(seed)
    with tfs.RingMirroredStrategy(['CPU:0', 'CPU:1']).scope():
      model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
      model.compile('adam', 'mse')
    x = np.random.default_rng(1).normal(size=[8, 3]).astype('float32')
    self.data = tf.data.Dataset.from_tensors((x, x[:, :2]))
    model.fit(self.data, verbose=0)
    return model

  @pytest.mark.smoke
  def test_models_and_checkpoints(self):
    model, other = self._model(1), self._model(2)
    self.assertNotAllClose(model.get_weights()[0], other.get_weights()[0])
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save('ram://checkpoints/c')
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    self.assertAllEqual(model.get_weights()[0], other.get_weights()[0])
    model.save('ram://model.keras')
    loaded = keras.models.load_model('ram://model.keras')
    self.assertAllEqual(model.get_weights()[0], loaded.get_weights()[0])
    other = self._model(3)
    model.save_weights('ram://a.weights.h5')
    other.load_weights('ram://a.weights.h5')
    self.assertAllEqual(model.get_weights()[0], other.get_weights()[0])


if __name__ == '__main__':
  tf.test.main()
