"""`reproducible` gives the same bits on any number of devices of one process.

The tests also cover the options that it rejects.
"""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tiers, virtual_devices
from tests.strategies import reproducible_program
from tf_strategies import _tf_internal, errors
from tf_strategies.strategies.mirrored import exact_sums, shards

virtual_devices.configure()
pytestmark = pytest.mark.skipif(
  not virtual_devices.IS_DETERMINISTIC,
  reason='on GPUs set TF_DETERMINISTIC_OPS=1',
)

_SHARDS = 8
_results = {}


def _create(kind, count, reproducible=_SHARDS):
  return tfs.create_strategy(
    kind, devices=virtual_devices.names(count), reproducible=reproducible
  )


def _of_one():
  """Returns the results of one replica, which trains once."""
  if not _results:
    _results['one'] = reproducible_program.fit(_create('ring_mirrored', 1))
  return _results['one']


class ReproducibleTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(
    ('4_devices', 'ring_mirrored', 4),
    ('central_storage', 'central_storage', 3),
    tiers.soak('2_devices', 'ring_mirrored', 2),
    tiers.soak('central_storage_of_one', 'central_storage', 1),
  )
  def test_same_bits(self, kind, count):
    want = reproducible_program.digests(_of_one())
    strategy = _create(kind, count)
    found = reproducible_program.digests(reproducible_program.fit(strategy))
    self.assertEqual(found, want)
    self.assertEqual(strategy.num_replicas_in_sync, count)

  @tiers.named_parameters(
    ('ring_mirrored', 'ring_mirrored', 3),
    tiers.soak('central_storage', 'central_storage', 2),
  )
  def test_gradients_of_loops(self, kind, count):
    """Trains a recurrent layer, whose loop passes gradients as a list of tensors."""
    rng = np.random.default_rng(4)
    words, labels = rng.integers(0, 9, (37, 5)), np.arange(37) % 3

    def train(strategy):
      keras.utils.set_random_seed(1)
      layers = keras.layers
      with strategy.scope():
        model = keras.Sequential(
          [
            keras.Input([5], dtype='int32'),
            layers.Embedding(9, 3, mask_zero=True),
            layers.LSTM(4),
            layers.Dense(3),
          ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile('adam', loss)
      model.fit(words, labels, batch_size=16, epochs=2, verbose=0)
      return reproducible_program.digest(model.get_weights())

    want = train(_create('ring_mirrored', 1))
    self.assertEqual(train(_create(kind, count)), want)

  @pytest.mark.smoke
  def test_other_order_of_plain_sums_is_found(self):
    """Checks that the test above detects sums in another order."""
    with mock.patch.multiple(
      exact_sums, encode=exact_sums.encode, decode=exact_sums.decode
    ):
      reproducible_program.add_plain_floats()
      found = {
        reproducible_program.digests(
          reproducible_program.fit(
            _create('ring_mirrored', count, 4), is_short=True
          )
        )
        for count in (1, 2)
      }
    self.assertLen(found, 2)

  def test_as_one_device(self):
    state, reports = _of_one()
    want, want_reports = reproducible_program.fit()
    for value, wanted in zip(state, want, strict=True):
      np.testing.assert_allclose(
        value.astype('f8'), wanted.astype('f8'), 0, 1e-6
      )
    for report, wanted in zip(reports, want_reports, strict=True):
      self.assertAllClose(report, wanted, 1e-6, 2e-6)

  @tiers.named_parameters(
    (
      'accumulation_steps_per_execution',
      {'steps_per_execution': 2, 'gradient_accumulation_steps': 2},
    ),
    tiers.soak('average', {'use_ema': True, 'ema_overwrite_frequency': 2}),
  )
  def test_options_of_keras(self, options):
    found = {
      reproducible_program.digests(
        reproducible_program.fit(
          _create('ring_mirrored', count, 4), is_short=True, **options
        )
      )
      for count in (1, 3)
    }
    self.assertLen(found, 1)


class RefusalsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    ({'reproducible': -1}, 'reproducible'),
    ({'reproducible': 129}, 'reproducible'),
    ({'reproducible': True, 'compression': 'bfloat16'}, 'compression'),
  )
  def test_wrong_options(self, options, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      tfs.RingOptions(**options)

  def test_fewer_shards_than_devices(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'reproducible=2 with 3 replicas.*=4'
    ):
      _create('ring_mirrored', 3, 2)

  def test_gpus_that_add_up_in_the_order_of_arrival(self):
    devices = ['/device:CPU:0', '/device:GPU:1']
    shards.check_determinism(devices[:1], 8)
    if virtual_devices.KIND == 'CPU':
      with self.assertRaisesRegex(
        errors.UnsupportedOptionError,
        r'reproducible=8 on .*GPU:1.*enable_op_determinism\(\)',
      ):
        shards.check_determinism(devices, 8)
    with mock.patch.object(
      _tf_internal, 'is_op_determinism_enabled', return_value=True
    ):
      shards.check_determinism(devices, 8)

  def test_loop_of_the_users_own(self):
    strategy = _create('ring_mirrored', 2)
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'strategy.run.*train_step'
    ):
      strategy.run(lambda: tf.constant(1.0))

  def test_random_numbers_without_a_seed(self):
    tf.random.set_seed(None)
    with (
      self.assertRaisesRegex(
        errors.UnsupportedOptionError, 'RandomStandardNormal.*set_random_seed'
      ),
      _create('ring_mirrored', 2).scope(),
    ):
      noise = keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)))
      model = keras.Sequential(
        [keras.layers.Input([3]), noise, keras.layers.Dense(1)]
      )
      model.compile('sgd', 'mse')
      model.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0)

  def test_batches_that_were_distributed_before(self):
    strategy = _create('ring_mirrored', 2)
    with strategy.scope():
      model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
      model.compile('sgd', 'mse')
    batches = tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.ones([4, 1])))
    distributed = strategy.experimental_distribute_dataset(batches)
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'distributed over replicas'
    ):
      model.fit(distributed, steps_per_epoch=1, verbose=0)


if __name__ == '__main__':
  tf.test.main()
