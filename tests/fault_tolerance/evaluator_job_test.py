"""Checkpoints of a parameter server job are evaluated beside it."""

import os
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import parameter_servers, processes, tiers

_ROWS, _BATCH, _EPOCHS = 96, 8, 2
_CLASSES, _WORDS = 3, 10


def _data():
  rng = np.random.default_rng(7)
  x = rng.integers(0, _WORDS, [_ROWS, 4])
  y = (x.sum(1) % _CLASSES).astype(np.int32)
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(_BATCH)


def _model(seed):
  import keras

  keras.utils.set_random_seed(seed)
  layers = keras.layers
  model = keras.Sequential(
    [
      keras.Input([4], dtype='int32'),
      layers.Embedding(_WORDS, 6),
      layers.Flatten(),
      layers.Dense(8, 'relu'),
      layers.BatchNormalization(),
      layers.Dropout(0.2),
      layers.Dense(_CLASSES, 'softmax'),
    ]
  )
  model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
  return model


def _count(directory: str, count: int | None = None) -> int:
  """Returns the number of evaluations in a file, after writing it if given."""
  path = os.path.join(directory, 'evaluated')
  if count is not None:
    with open(path + '.part', 'w') as f:
      f.write(str(count))
    os.replace(path + '.part', path)
    return count
  if not os.path.exists(path):
    return 0
  with open(path) as f:
    return int(f.read())


def train(directory: str, mode: str) -> list[dict[str, float]]:
  """Trains; returns the job's own evaluation at each checkpoint that it writes."""
  import keras

  import tf_strategies as tfs

  partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner
  strategy = tfs.ParameterServerStrategy(
    variable_partitioner=partitioner(2),
    mode=mode,
    checkpoint_dir=os.path.join(directory, 'checkpoints'),
    checkpoint_steps=10_000,
  )
  with strategy.scope():
    model = _model(1)
  parts = [getattr(v.value, 'parts', ()) for v in model.weights]
  assert max(map(len, parts)) == 2, 'no variable is cut'
  found = []

  def evaluate():
    results = model.evaluate(_data(), return_dict=True, verbose=0)
    steps = int(model.optimizer.iterations.numpy())
    found.append({**results, 'iterations': steps})

  def save(epoch, logs):
    strategy.save()
    evaluate()
    # Old checkpoints are deleted.
    processes.wait_until(lambda: _count(directory) >= len(found), 120.0)

  evaluate()  # The first checkpoint is written before the first step.
  model.fit(
    _data(),
    epochs=_EPOCHS,
    verbose=0,
    callbacks=[
      keras.callbacks.LambdaCallback(on_epoch_end=save),
      tfs.Run(os.path.join(directory, 'checkpoints'), model),
    ],
  )
  evaluate()  # The last one is written when `fit` ends.
  strategy.close()
  return found


def evaluate_all(directory: str) -> list[dict[str, Any]]:
  """Returns the results of a `SidecarEvaluator` for every checkpoint."""
  import tf_strategies as tfs

  checkpoints = os.path.join(directory, 'checkpoints')
  options = {'poll_seconds': 0.05}
  evaluator = tfs.SidecarEvaluator(
    _model(2), _data(), checkpoints, max_evaluations=1, **options
  )
  found = []
  # It ends without an evaluation when the job is finished.
  while evaluations := evaluator.run():
    found += evaluations
    _count(directory, len(found))
  return [{**e.results, 'iterations': e.iterations} for e in found]


class EvaluatorJobTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.parameters(('async', 2), tiers.soak('sync', 1))
  def test_every_checkpoint(self, mode, num_workers):
    with (
      tempfile.TemporaryDirectory() as directory,
      parameter_servers.Job(num_workers=num_workers, num_ps=2) as job,
    ):
      job.start_chief(train, (directory, mode))
      job.start_function('evaluator', evaluate_all, (directory,))
      expected = job.wait().result()
      (outcome,) = job.wait_for(['evaluator'])
      found = outcome.result()
    steps_per_epoch = _ROWS // _BATCH
    steps = [i * steps_per_epoch for i in (*range(_EPOCHS + 1), _EPOCHS)]
    self.assertEqual([e['iterations'] for e in found], steps)
    self.assertEqual(set(found[0]), {'loss', 'accuracy', 'iterations'})
    self.assertEqual(len({e['loss'] for e in found}), _EPOCHS + 1)
    self.assertAllClose(found, expected, 1e-6, 1e-6)


if __name__ == '__main__':
  tf.test.main()
