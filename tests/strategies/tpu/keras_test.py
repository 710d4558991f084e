"""A Keras training step, traced for TPUs and run on all replicas."""

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import tf_case, tiers
from tests.strategies.tpu import double, program
from tf_strategies.collectives.algorithms.ring import ring_all_reduce

_REPLICAS = 4
_RING = 2 * (_REPLICAS - 1)


def sgd():
  return keras.optimizers.SGD(0.1)


def adam(**options):
  return keras.optimizers.Adam(0.1, **options)


def create_model(has_statistics=False):
  keras.utils.set_random_seed(0)
  layers = [keras.Input([3]), keras.layers.Dense(4)]
  if has_statistics:
    layers.append(keras.layers.BatchNormalization())
  return keras.Sequential([*layers, keras.layers.Dense(1)])


def batches():
  random = np.random.default_rng(0)
  shape = [_REPLICAS, 6]
  x = random.normal(size=[*shape, 3]).astype(np.float32)
  return x, random.normal(size=[*shape, 1]).astype(np.float32)


class Replicas:
  """A model under `TPURingStrategy`, whose train step is a traced program."""

  def __init__(self, create_optimizer, has_statistics=False):
    strategy = double.create_strategy(_REPLICAS)
    with strategy.scope():
      self.model = create_model(has_statistics)
      self.model.compile(create_optimizer(), 'mse', auto_scale_loss=False)
      self.model.optimizer.build(self.model.trainable_variables)
    self.step = program.Program(
      strategy, lambda x, y: self.model.train_step((x, y)), batches()
    )

  @property
  def variables(self):
    """Returns the model's and the optimizer's variables, in the order of one device."""
    return [*self.model.variables, *self.model.optimizer.variables]

  def train(self, num_steps=1):
    """Returns each replica's values of `variables` after some steps."""
    metrics = [v for m in self.model.metrics for v in m.variables]
    used = [v.value for v in (*self.variables, *metrics)]
    for _ in range(num_steps):
      _, values = self.step.run(_REPLICAS, used)
      for variable, by_replica in zip(used, values, strict=True):
        for component, value in zip(variable.values, by_replica, strict=True):
          component.assign(value)
    return values[: len(self.variables)]


def one_device(create_optimizer, num_steps):
  model = create_model()
  model.compile(create_optimizer(), 'mse', auto_scale_loss=False)
  model.optimizer.build(model.trainable_variables)
  x, y = (t.reshape([-1, t.shape[-1]]) for t in batches())
  for _ in range(num_steps):
    model.train_step((x, y))
  return model


class KerasTest(tf_case.TestCase):
  @tiers.named_parameters(
    tiers.smoke('sgd', sgd, 1),
    ('clipped', lambda: adam(global_clipnorm=0.1), 1),
    ('accumulated', lambda: adam(gradient_accumulation_steps=2), 2),
  )
  def test_equals_one_device(self, create_optimizer, num_steps):
    replicas = Replicas(create_optimizer)
    one = one_device(create_optimizer, num_steps)
    before = replicas.model.layers[0].kernel.numpy()
    values = replicas.train(num_steps)
    expected = [*one.variables, *one.optimizer.variables]
    self.assertLen(values, len(expected))
    for by_replica, variable in zip(values, expected, strict=True):
      for value in by_replica:
        self.assertEqual(value.tobytes(), by_replica[0].tobytes())
        self.assertAllClose(
          value, variable.numpy(), atol=1e-6, rtol=1e-6, msg=variable.path
        )
    self.assertNotAllClose(before, one.layers[0].kernel.numpy())
    self.assertEmpty(replicas.step.sums)
    # There is one all-reduce: Keras does not add a second one.
    self.assertLen(replicas.step.permutes, _RING)
    self.assertIsNone(replicas.step.mismatch(ring_all_reduce(_REPLICAS)))

  def test_batch_normalization_statistics_are_averaged(self):
    replicas = Replicas(sgd, has_statistics=True)
    values = dict(
      zip([v.path for v in replicas.variables], replicas.train(), strict=True)
    )
    norm = replicas.model.layers[1]
    x, _ = batches()
    kernel = keras.ops.convert_to_numpy(create_model(True).layers[0].kernel)
    means = (x @ kernel).mean(1)
    self.assertNotAllClose(means[0], means.mean(0))
    for value in values[norm.moving_mean.path]:
      self.assertAllClose(value, 0.01 * means.mean(0), atol=1e-6)
      self.assertEqual(
        value.tobytes(), values[norm.moving_mean.path][0].tobytes()
      )

  def test_clipping_of_sparse_gradients_is_refused(self):
    strategy = double.create_strategy(_REPLICAS)
    with strategy.scope():
      model = keras.Sequential(
        [keras.Input([2], dtype='int32'), keras.layers.Embedding(5, 3)]
      )
      model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), 'mse')
    ids = np.ones([_REPLICAS, 2, 2], np.int32)
    y = np.ones([_REPLICAS, 2, 2, 3], np.float32)
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'clips sparse gradients'
    ):
      program.Program(strategy, lambda x, y: model.train_step((x, y)), [ids, y])

  def test_replicas_check_the_same_gradients_for_overflow(self):
    replicas = Replicas(lambda: keras.optimizers.LossScaleOptimizer(sgd()))
    # All replicas test the sum, so the all-reduce is outside the branches.
    self.assertLen(replicas.step.permutes, _RING)
    self.assertIsNone(replicas.step.mismatch(ring_all_reduce(_REPLICAS)))


if __name__ == '__main__':
  tf.test.main()
