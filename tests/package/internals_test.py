"""The import checks every private name of TensorFlow and Keras that we use."""

import importlib
import inspect
import pkgutil
import time
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras.src.backend.tensorflow import core, trainer
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.random import seed_generator

from tests import tf_case
from tf_strategies import _keras_internal, _tf_internal, errors

TFTrainer = trainer.TensorFlowTrainer

# Public methods that we override are checked only in these classes. Elsewhere
# TensorFlow's documentation guarantees them.
_CHECKED_IF_PUBLIC = (_tf_internal.MirroredExtended, _tf_internal.TPUExtended)


def _renamed(new_name):
  def method(self, **kwargs):
    del self, kwargs

  method.__signature__ = inspect.Signature(
    [
      inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
      for name in ('self', new_name)
    ]
  )
  return method


def _our_classes():
  """Returns every class of the package that derives from a TensorFlow class."""
  for name in ('strategies', 'cross_device'):
    package = importlib.import_module(f'tf_strategies.{name}')
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):
      for found in vars(importlib.import_module(info.name)).values():
        if inspect.isclass(found) and found.__module__ == info.name:
          yield found


def _overridden(ours):
  """Yields (base, name) for each private TensorFlow method that `ours` overrides."""
  bases = [b for b in ours.__mro__ if b.__module__.startswith('tensorflow.')]
  for name, value in vars(ours).items():
    if not inspect.isfunction(value) and not isinstance(value, property):
      continue
    is_private = name.startswith('_') and not name.startswith('__')
    for base in bases:
      if name in vars(base) and (
        is_private
        or (issubclass(base, _CHECKED_IF_PUBLIC) and name != '__init__')
      ):
        yield base, name
        break


class TensorFlowTest(tf_case.TestCase):
  @pytest.mark.smoke
  def test_every_override_is_listed(self):
    listed = [
      (owner, method.partition('(')[0])
      for owner, methods in _tf_internal._OVERRIDDEN.items()
      for method in methods
    ]
    missing, found = [], 0
    for ours in _our_classes():
      for base, name in _overridden(ours):
        found += 1
        if not any(
          issubclass(ours, owner) and name == n for owner, n in listed
        ):
          missing.append(f'{ours.__qualname__}.{name} of {base.__name__}')
    self.assertGreater(found, 40)
    self.assertEmpty(missing)

  @pytest.mark.smoke
  def test_installed_version_passes_quickly(self):
    began = time.process_time()
    _tf_internal.check_overridden()
    _keras_internal.check()
    self.assertLess(time.process_time() - began, 0.05)

  @parameterized.parameters(
    (_tf_internal.MirroredExtended, '_reduce_to'),
    (tf.distribute.ReplicaContext, '_merge_call'),
  )
  def test_changed_method_is_named(self, owner, name):
    with (
      mock.patch.object(owner, name, _renamed('renamed')),
      self.assertRaisesRegex(
        errors.UnsupportedVersionError,
        rf'Expected .*\.{name}\(.*TensorFlow \d.*tested version: TensorFlow 2',
      ),
    ):
      _tf_internal.check_overridden()

  def test_missing_symbol_is_named(self):
    with self.assertRaisesRegex(
      errors.UnsupportedVersionError,
      r'distribute\.values\.Gone \(needed: a test\).*TensorFlow 2\.18',
    ):
      _tf_internal._load('distribute.values.Gone', 'a test')


class KerasTest(tf_case.TestCase):
  @parameterized.parameters(
    (TFTrainer, 'fit', '_initial_epoch|train_function'),
    (TFTrainer, 'make_train_function', 'make_train_function'),
    (tf_optimizer.TFOptimizer, '_var_key', '_var_key'),
    (core.Variable, '_maybe_autocast', '_maybe_autocast'),
    (keras.optimizers.LossScaleOptimizer, 'build', 'dynamic_scale'),
    (seed_generator.SeedGenerator, '__init__', 'seed_generator_state'),
  )
  def test_changed_method_is_named_with_its_version(self, owner, name, named):
    with (
      mock.patch.object(owner, name, _renamed('renamed')),
      self.assertRaisesRegex(
        errors.UnsupportedVersionError,
        rf'Expected .*({named}).*Keras \d.*Fix: .* Keras 3\.12',
      ),
    ):
      _keras_internal.check()


if __name__ == '__main__':
  tf.test.main()
