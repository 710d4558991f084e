"""The models and optimizers of the MNIST examples.

Layers have names, so that checkpoints and saved weights do too.

Example:

  >>> build_model('mlp', num_classes=10).count_params()
  13002
"""

from __future__ import annotations

import keras

import tf_strategies as tfs
from examples import common_flags


def build_model(
  name: str, num_classes: int, dropout: float = 0.0
) -> keras.Model:
  """Returns an untrained model of 28x28 images that ends in logits.

  Args:
    name: 'cnn', or 'mlp' (784-16-16-10, 13,002 parameters).
    num_classes: width of the last layer.
    dropout: share of the last hidden layer that is dropped in training.
  """
  hidden = _cnn_layers() if name == 'cnn' else _mlp_layers()
  if dropout:
    hidden.append(keras.layers.Dropout(dropout, name='dropout'))
  # Logits stay float32 in mixed precision: a 16-bit softmax loses the tail.
  logits = keras.layers.Dense(num_classes, dtype='float32', name='logits')
  return keras.Sequential(
    [keras.Input([28, 28, 1]), *hidden, logits], name=name
  )


def _cnn_layers() -> list[keras.layers.Layer]:
  return [
    keras.layers.Conv2D(16, 5, activation='relu', name='conv_1'),
    keras.layers.MaxPooling2D(2, name='pool_1'),
    keras.layers.Conv2D(32, 5, activation='relu', name='conv_2'),
    keras.layers.MaxPooling2D(2, name='pool_2'),
    keras.layers.Flatten(name='flatten'),
    keras.layers.Dense(128, activation='relu', name='hidden'),
  ]


def _mlp_layers() -> list[keras.layers.Layer]:
  return [
    keras.layers.Flatten(name='flatten'),
    keras.layers.Dense(16, activation='relu', name='hidden_1'),
    keras.layers.Dense(16, activation='relu', name='hidden_2'),
  ]


@keras.saving.register_keras_serializable(package='examples')
class LinearWarmup(keras.optimizers.schedules.LearningRateSchedule):
  """Rises linearly to `learning_rate` in `warmup_steps`, then stays.

  A large global batch needs a large learning rate, which would diverge from
  the random initial weights (Goyal et al. 2017, section 2.2).

  Args:
    learning_rate: the value from step `warmup_steps` on.
    warmup_steps: at least 1.
  """

  def __init__(self, learning_rate: float, warmup_steps: int):
    super().__init__()
    self._learning_rate = learning_rate
    self._warmup_steps = warmup_steps

  def __call__(self, step):
    """The learning rate of `step`, counted from 0."""
    done = (keras.ops.cast(step, 'float32') + 1.0) / self._warmup_steps
    return self._learning_rate * keras.ops.minimum(done, 1.0)

  def get_config(self):
    """The arguments."""
    return {
      'learning_rate': self._learning_rate,
      'warmup_steps': self._warmup_steps,
    }


def peak_learning_rate(
  options: common_flags.TrainingOptions, num_replicas: int
) -> float:
  """The learning rate after the warm-up, scaled if that was asked for."""
  scale = num_replicas if options.scale_learning_rate else 1
  return options.learning_rate * scale


def build_optimizer(
  options: common_flags.TrainingOptions, num_replicas: int
) -> keras.optimizers.Optimizer:
  """Returns the optimizer, ready for `fit` or a loop of one's own.

  The wrapper reduces gradients over replicas, weighted by rows, before the
  optimizer sees them. Loss scaling goes around it, where `compile` would put
  it too. TensorFlow's own mirrored strategy has no such wrapper, and a worker
  with parameter servers needs none: it is the only replica of its step.
  """
  rate = peak_learning_rate(options, num_replicas)
  if options.warmup_steps:
    rate = LinearWarmup(rate, options.warmup_steps)
  if options.optimizer == 'sgd':
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, name='sgd')
  else:
    optimizer = keras.optimizers.Adam(rate, name='adam')
  if options.strategy not in ('mirrored', 'parameter_server'):
    optimizer = tfs.keras.DistributedOptimizer(optimizer)
  if options.mixed_precision == 'mixed_float16':
    optimizer = keras.optimizers.LossScaleOptimizer(
      optimizer, name='loss_scale'
    )
  return optimizer
