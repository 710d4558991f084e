"""A `SidecarEvaluator` evaluates the checkpoints of a parameter server job."""

import os
import pathlib
import tempfile
from typing import Any

import keras
import tensorflow as tf

import tf_strategies as tfs
from tests import parameter_servers, processes, tf_case, tiers
from tests.programs import common

_STEPS, _EPOCHS = 3, 2


def _data():
  return common.batches(*common.tokens(_STEPS * common.BATCH))


def _model(seed):
  keras.utils.set_random_seed(seed)
  return common.compiled(common.embedding_model)


def _evaluated(directory: str, count: int) -> pathlib.Path:
  """Returns the file that exists once `count` checkpoints have been evaluated."""
  return pathlib.Path(directory, f'evaluated_{count}')


def train(directory: str, mode: str) -> list[dict[str, float]]:
  """Trains. Returns the job's own evaluation at each of its checkpoints."""
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
  assert max(map(len, parts)) == 2, 'no variable is partitioned'
  found = []

  def evaluate():
    results = model.evaluate(_data(), return_dict=True, verbose=0)
    steps = int(model.optimizer.iterations.numpy())
    found.append({**results, 'iterations': steps})

  def save(epoch, logs):
    strategy.save()
    evaluate()
    # Waits for the evaluator, since old checkpoints are deleted.
    processes.wait_until(_evaluated(directory, len(found)).exists, 120.0)

  evaluate()  # The first checkpoint is written before the first step.
  common.fit(
    model,
    _data(),
    epochs=_EPOCHS,
    callbacks=[
      keras.callbacks.LambdaCallback(on_epoch_end=save),
      tfs.Run(os.path.join(directory, 'checkpoints'), model),
    ],
  )
  evaluate()  # The last checkpoint is written when `fit` ends.
  strategy.close()
  return found


def evaluate_all(directory: str) -> list[dict[str, Any]]:
  """Returns the results of a `SidecarEvaluator` for every checkpoint."""
  evaluator = tfs.SidecarEvaluator(
    _model(2),
    _data(),
    os.path.join(directory, 'checkpoints'),
    max_evaluations=1,
    poll_seconds=0.05,
  )
  found = []
  # `run` returns no evaluations once the job is finished.
  while evaluations := evaluator.run():
    found += evaluations
    _evaluated(directory, len(found)).touch()
  return [{**e.results, 'iterations': e.iterations} for e in found]


class EvaluatorJobTest(tf_case.TestCase):
  @tiers.parameters(('async', 2), tiers.soak('sync', 1))
  def test_every_checkpoint_is_evaluated(self, mode, num_workers):
    with (
      tempfile.TemporaryDirectory() as directory,
      parameter_servers.Job(num_workers=num_workers, num_ps=2) as job,
    ):
      job.start_chief(train, (directory, mode))
      job.start_function('evaluator', evaluate_all, (directory,))
      expected = job.wait().result()
      (outcome,) = job.wait_for(['evaluator'])
      found = outcome.result()
    steps = [i * _STEPS for i in (*range(_EPOCHS + 1), _EPOCHS)]
    self.assertEqual([e['iterations'] for e in found], steps)
    self.assertEqual(set(found[0]), {'loss', 'accuracy', 'iterations'})
    self.assertEqual(len({e['loss'] for e in found}), _EPOCHS + 1)
    self.assertAllClose(found, expected, 1e-6, 1e-6)


if __name__ == '__main__':
  tf.test.main()
