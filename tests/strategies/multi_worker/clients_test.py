"""Client libraries read attributes of a strategy and create objects from it."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, tf_case, tiers, virtual_devices

virtual_devices.configure()


def _read(strategy):
  """Returns the attributes that TensorFlow's multi-worker strategies have."""
  extended = strategy.extended
  assert extended._cluster_resolver is strategy.cluster_resolver
  spec = extended._cluster_spec
  return {
    '_task_type': extended._task_type,
    '_task_id': extended._task_id,
    '_id_in_cluster': extended._id_in_cluster,
    '_num_workers': extended._num_workers,
    '_is_chief': extended._is_chief,
    '_cluster_spec': spec and spec.as_dict(),
  }


def _ask_for_handler(resolver, directory):
  """Returns the error of TensorFlow's preemption handler, or None."""
  try:
    tf.distribute.experimental.PreemptionCheckpointHandler(
      resolver, tf.train.Checkpoint(step=tf.Variable(0)), directory
    )
  except tfs.errors.UnsupportedOptionError as e:
    return str(e)
  return None


def _attributes(rank, name, directory):
  strategy = tfs.create_strategy(name)
  config = tf.distribute.cluster_resolver.TFConfigClusterResolver()
  return {
    **_read(strategy),
    'addresses': config.cluster_spec().as_dict(),
    'handler': [
      _ask_for_handler(resolver, os.path.join(directory, str(rank)))
      for resolver in (strategy.cluster_resolver, config)
    ],
  }


def _search(rank, directory):
  """Searches with KerasTuner on several workers. Returns trials and best model."""
  import keras_tuner

  strategy = tfs.MultiWorkerRingStrategy() if rank is not None else None
  x = np.random.default_rng(0).normal(size=[64, 4]).astype('float32')
  y = x.sum(1, keepdims=True)

  def build(parameters):
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(parameters.Int('units', 2, 8))
    model = keras.Sequential([keras.Input([4]), hidden, keras.layers.Dense(1)])
    rate = parameters.Choice('rate', [0.1, 0.01, 0.001])
    model.compile(keras.optimizers.SGD(rate), 'mse')
    return model

  tuner = keras_tuner.RandomSearch(
    build,
    'val_loss',
    max_trials=3,
    seed=1,
    directory=directory,
    distribution_strategy=strategy,
  )
  tuner.search(x, y, epochs=2, validation_split=0.25, verbose=0)
  trials = tuner.oracle.trials.values()
  weights = tuner.get_best_models(1)[0].get_weights()
  if strategy is not None:
    # No worker ends before all have read the files and built the model.
    strategy.extended.communicator.exchange('end', None)
  return {
    'values': [t.hyperparameters.values for t in trials],
    'scores': [float(t.score) for t in trials],
    'weights': weights,
  }


class ClientsTest(tf_case.TestCase):
  @tiers.named_parameters(
    ('ring', 'multi_worker_ring'),
    tiers.soak('collective', 'multi_worker_collective'),
  )
  def test_attributes_of_each_worker(self, name):
    results = processes.run_workers(_attributes, 2, args=(name, self.directory))
    for rank, found in enumerate(results):
      handler, addresses = found.pop('handler'), found.pop('addresses')
      self.assertLen(addresses['worker'], 2)
      self.assertEqual(
        found,
        {
          '_task_type': 'worker',
          '_task_id': rank,
          '_id_in_cluster': rank,
          '_num_workers': 2,
          '_is_chief': rank == 0,
          '_cluster_spec': addresses,
        },
      )
      for error in handler:
        if name == 'multi_worker_ring':
          self.assertRegex(error, 'use tfs.Run.*Model Garden')
        else:
          self.assertIsNone(error)

  def test_attributes_without_a_cluster(self):
    strategy = tfs.MultiWorkerRingStrategy(devices=virtual_devices.names(1))
    self.addCleanup(strategy.close)
    stock = tf.distribute.MultiWorkerMirroredStrategy()
    self.assertEqual(_read(strategy), _read(stock))
    self.assertIsNone(
      _ask_for_handler(strategy.cluster_resolver, self.directory)
    )

  @pytest.mark.soak
  def test_keras_tuner_gives_the_results_of_one_device(self):
    alone = _search(None, self.path('alone'))
    shared = self.path('shared')
    for found in processes.run_workers(_search, 2, args=(shared,)):
      self.assertEqual(found['values'], alone['values'])
      self.assertAllClose(found['scores'], alone['scores'], 0, 1e-6)
      for got, want in zip(found['weights'], alone['weights'], strict=True):
        self.assertAllClose(got, want, 0, 1e-6)
    self.assertEmpty([d for d, _, _ in os.walk(shared) if 'workertemp' in d])


if __name__ == '__main__':
  tf.test.main()
