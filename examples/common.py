"""Shared code of the examples: common flags, and objects made from them.

Flags of a single example are defined in its file. TensorFlow is imported inside
functions, so that `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import atexit
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from absl import app, flags

import tf_strategies as tfs
from tf_strategies.cluster import exit_codes

FLAGS = flags.FLAGS
STRATEGIES = (
  'one_device',
  'mirrored',
  'ring_mirrored',
  'multi_worker_ring',
  'multi_worker_collective',
  'parameter_server',
  'central_storage',
  'tpu_ring',
)
_DATASETS = ('mnist', 'digits', 'synthetic')
# Enough for 97% on digits and 98.5% on MNIST; synthetic images show the speed.
_EPOCHS = {'mnist': 3, 'digits': 12, 'synthetic': 1}
_LEARNING_RATES = {'sgd': 0.02, 'adam': 1e-3}
# auto chooses by the devices; builtin is TensorFlow's own.
_ALL_REDUCES = (
  'auto',
  'ring',
  'direct',
  'tree',
  'halving_doubling',
  'hierarchical',
  'naive',
  'builtin',
)
_POLICIES = ('float32', 'mixed_float16', 'mixed_bfloat16')
_MODES = ('async', 'sync', 'bounded')
# Arguments of `tfs.ParameterServerStrategy` that have a flag.
_SERVER_FLAGS = (
  *('mode', 'backup_workers', 'max_staleness'),
  *('checkpoint_dir', 'checkpoint_steps'),
)
# Splitting a variable costs a message for each part. Of the models here, only
# the kernel of the hidden layer (256 KiB) is worth it.
_MIN_PART_BYTES = 64 << 10
# TensorFlow requires a limit for each virtual GPU. Two gigabytes are many times
# what these models need, and eight such devices fit on a 16 GB card.
_VIRTUAL_GPU_MEGABYTES = 2048

# Data and model.
flags.DEFINE_enum('dataset', 'mnist', _DATASETS, 'What to train on.')
flags.DEFINE_string('data_path', None, 'MNIST: .npz file, IDX or TFRecord dir.')
flags.DEFINE_enum('model', 'cnn', ['cnn', 'mlp'], 'Or 784-16-16-10.')
flags.DEFINE_float('dropout', 0, 'Of the last hidden layer.', 0, 0.99)
flags.DEFINE_enum('optimizer', 'sgd', ['sgd', 'adam'], 'SGD: momentum 0.9.')
flags.DEFINE_float('learning_rate', None, 'Default: by optimizer.', 1e-12)
flags.DEFINE_bool('scale_learning_rate', False, 'By the number of replicas.')
flags.DEFINE_integer('warmup_steps', 0, 'Of a linear warm-up of the rate.', 0)
flags.DEFINE_enum('mixed_precision', 'float32', _POLICIES, 'Dtype policy.')
flags.DEFINE_integer('seed', 0, 'Of weights and shuffling.', 0, 2**31 - 1)
flags.DEFINE_integer('global_batch_size', 64, 'Images in a step.', 1)
flags.DEFINE_integer('epochs', None, 'Default: 3 of MNIST, 12 of digits.', 0)
flags.DEFINE_integer(
  'steps_per_epoch',
  None,
  'Default: one pass over the data. After more or fewer steps, the next epoch '
  'continues where this one ended.',
  1,
)
flags.DEFINE_string('checkpoint_dir', None, 'Save here, resume from here.')
flags.DEFINE_integer('checkpoint_steps', None, 'Between two checkpoints.', 1)
# The strategy.
flags.DEFINE_enum('strategy', 'ring_mirrored', STRATEGIES, 'By name.')
flags.DEFINE_integer(
  'num_virtual_devices',
  0,
  'Split the GPU, or else the CPU, into this many logical devices and use '
  'them; 0 uses the devices as they are.',
  0,
)
flags.DEFINE_enum(
  'all_reduce',
  'auto',
  _ALL_REDUCES,
  "Of ring_mirrored and mirrored; builtin (mirrored only) is TensorFlow's.",
)
flags.DEFINE_integer(
  'local_steps', None, 'Train so many apart: tfs.keras.LocalSteps.', 1
)
flags.DEFINE_bool('worker_input', False, 'Workers read their training data.')
# Parameter servers.
flags.DEFINE_enum('mode', 'async', _MODES, 'When a gradient is applied.')
flags.DEFINE_integer('backup_workers', 0, '--mode=sync: may be late.', 0)
flags.DEFINE_integer(
  'max_staleness', None, '--mode=bounded: steps ahead of the slowest, or 1.', 0
)
flags.DEFINE_integer('variable_partitions', 0, 'Of a large variable.', 0)
# Output.
flags.DEFINE_bool('verbose', True, 'Show progress.')
flags.DEFINE_string('report_json', None, 'Write the report of the run here.')
flags.DEFINE_string(
  'save_weights',
  None,
  'Write the final weights to this .npz file, for examples.compare_weights. '
  'With {rank} in its name, every worker writes one.',
)
flags.DEFINE_float('min_accuracy', None, 'Below it, exit with status 2.', 0, 1)
flags.DEFINE_string(
  'log_dir',
  None,
  'Write TensorBoard logs here.',
  # absl.logging has a flag of this name, for log files that nobody writes here.
  allow_override=True,
)
flags.DEFINE_string(
  'timeline',
  None,
  'Write a timeline for Perfetto to this file, one for each rank. Merge them '
  'with tfs timeline merge.',
)


def run(main: Callable[[], Mapping[str, Any] | None]) -> None:
  """Parses the flags, calls `main`, which returns a report, and exits.

  The status is 0; 1 for flags, data or checkpoints that cannot be used, with a
  message; 2 if the test accuracy is below --min_accuracy; 143 after a
  preemption or the loss of a worker, when a restart helps.
  """
  app.run(lambda argv: _run(argv, main))


def _run(argv, main) -> int:
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {" ".join(argv[1:])}')
  try:
    prepare_flags()
    import_tensorflow()
    report = main()
  except tfs.errors.Error as e:
    # Meant for the user, who needs no traceback to understand it.
    print(f'{type(e).__name__}: {e}', file=sys.stderr)
    return exit_codes.exit_code(e)
  least = FLAGS.min_accuracy
  if report is None or not report['is_chief'] or least is None:
    return 0
  accuracy = report['test']['accuracy']
  if accuracy >= least:
    return 0
  print(
    f'Test accuracy {accuracy:.4f} is below --min_accuracy={least}.',
    file=sys.stderr,
  )
  return 2


def import_tensorflow() -> None:
  """Imports TensorFlow without the lines that no setting of its turns off."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  shown = os.dup(2)
  try:
    with open(os.devnull, 'w') as nowhere:
      os.dup2(nowhere.fileno(), 2)
    importlib.import_module('tensorflow')
  finally:
    os.dup2(shown, 2)
    os.close(shown)


def prepare_flags() -> None:
  """Checks that the parsed flags fit together, and fills in their defaults.

  Raises:
    UnsupportedOptionError: flags that contradict each other.
  """
  if FLAGS.all_reduce == 'builtin' and FLAGS.strategy != 'mirrored':
    raise tfs.errors.UnsupportedOptionError(
      f'--strategy={FLAGS.strategy}',
      '--strategy=mirrored with --all_reduce=builtin',
      'write --strategy=mirrored, or choose another --all_reduce',
    )
  is_elastic = _optional_flag('elastic')
  if is_elastic and FLAGS.strategy != 'multi_worker_ring':
    raise tfs.errors.UnsupportedOptionError(
      f'--strategy={FLAGS.strategy}',
      '--strategy=multi_worker_ring with --elastic',
      'write --strategy=multi_worker_ring, or leave --elastic out',
    )
  if is_elastic and FLAGS.checkpoint_dir:
    raise tfs.errors.UnsupportedOptionError(
      'both',
      '--elastic or --checkpoint_dir',
      'leave one out: an elastic job keeps its state in its workers',
    )
  FLAGS.epochs = FLAGS.epochs or _EPOCHS[FLAGS.dataset]
  if FLAGS.learning_rate is None:
    FLAGS.learning_rate = _LEARNING_RATES[FLAGS.optimizer]


def _optional_flag(name: str) -> Any:
  """The value of a flag that not every example has."""
  return FLAGS[name].value if name in FLAGS else None


def create_strategy():
  """Returns what --strategy names; call it before TensorFlow starts."""
  strategy = tfs.create_strategy(FLAGS.strategy, **strategy_options())
  if has_servers(strategy):
    atexit.register(strategy.close)
  return strategy


def strategy_options() -> dict[str, Any]:
  """Returns the arguments of `tfs.create_strategy`."""
  options = {}
  if FLAGS.num_virtual_devices:
    options['devices'] = devices()
  if FLAGS.strategy in ('ring_mirrored', 'mirrored'):
    if FLAGS.all_reduce == 'auto':
      options['cross_device_ops'] = tfs.AutoAllReduce()
    elif FLAGS.all_reduce != 'builtin':
      options['cross_device_ops'] = tfs.ScheduledAllReduce(FLAGS.all_reduce)
  if FLAGS.strategy == 'parameter_server':
    options |= {name: FLAGS[name].value for name in _SERVER_FLAGS}
    if FLAGS.variable_partitions:
      import tensorflow as tf

      partitioners = tf.distribute.experimental.partitioners
      options['variable_partitioner'] = partitioners.MinSizePartitioner(
        _MIN_PART_BYTES, FLAGS.variable_partitions
      )
  return options


def devices() -> list[str] | None:
  """Returns the logical devices of --num_virtual_devices; None for all."""
  count = FLAGS.num_virtual_devices
  return split_device(count) if count else None


def split_device(count: int) -> list[str]:
  """Splits the first GPU, or else the CPU; returns the names of its parts.

  Raises:
    UnsupportedOptionError: TensorFlow runs already, with other devices.
  """
  import tensorflow as tf

  gpus = tf.config.list_physical_devices('GPU')
  physical = gpus[0] if gpus else tf.config.list_physical_devices('CPU')[0]
  limit = _VIRTUAL_GPU_MEGABYTES if gpus else None
  part = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
  try:
    tf.config.set_logical_device_configuration(physical, [part] * count)
  except RuntimeError as e:
    raise tfs.errors.UnsupportedOptionError(
      f'--num_virtual_devices={count} after it',
      'split_device before the first operation of TensorFlow',
      'call split_device first',
    ) from e
  return [f'{physical.device_type}:{i}' for i in range(count)]


def hidden_layers() -> list:
  """Returns the layers of --model between the images and the logits."""
  from keras import layers

  if FLAGS.model == 'mlp':  # Small and fast.
    return [
      layers.Flatten(),
      layers.Dense(16, activation='relu', name='hidden_1'),
      layers.Dense(16, activation='relu', name='hidden_2'),
    ]
  return [
    layers.Conv2D(16, 5, activation='relu', name='conv_1'),
    layers.MaxPooling2D(2),
    layers.Conv2D(32, 5, activation='relu', name='conv_2'),
    layers.MaxPooling2D(2),
    layers.Flatten(),
    layers.Dense(128, activation='relu', name='hidden'),
  ]


def build_optimizer(strategy):
  """Returns the Keras optimizer that the flags describe."""
  import keras

  rate = learning_rate(strategy)
  if FLAGS.warmup_steps:  # The first step has rate / warmup_steps.
    rate = keras.optimizers.schedules.PolynomialDecay(
      rate / FLAGS.warmup_steps, max(1, FLAGS.warmup_steps - 1), rate
    )
  if FLAGS.optimizer == 'sgd':
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, name='sgd')
  else:
    optimizer = keras.optimizers.Adam(rate, name='adam')
  if FLAGS.local_steps:
    optimizer = tfs.keras.LocalSteps(optimizer, FLAGS.local_steps)
  if FLAGS.mixed_precision == 'mixed_float16':
    # Outside of the wrapper, where `compile` would put it too.
    optimizer = keras.optimizers.LossScaleOptimizer(
      optimizer, name='loss_scale'
    )
  return optimizer


def learning_rate(strategy) -> float:
  """Returns the learning rate after the warm-up."""
  scale = strategy.num_replicas_in_sync if FLAGS.scale_learning_rate else 1
  return FLAGS.learning_rate * scale


def pipeline_options() -> tfs.data.PipelineOptions:
  """Returns how training batches are made.

  TensorFlow's own mirrored strategy gets full batches only: a replica with
  fewer rows would count too much, and one without rows can abort the process
  (the gradient of max pooling).
  """
  full = FLAGS.strategy == 'mirrored'
  return tfs.data.PipelineOptions(
    FLAGS.global_batch_size, seed=FLAGS.seed, drop_remainder=full
  )


def steps_per_epoch(data) -> int:
  """Returns the training steps of an epoch.

  They are a multiple of --steps_per_execution, where there is such a flag: Keras
  would take the rest of a group of steps from the next epoch.

  Raises:
    DataError: the data are less than one full batch, or one group of steps.
  """
  batch, n = FLAGS.global_batch_size, data.train.num_examples
  full = pipeline_options().drop_remainder
  if full and n < batch:
    raise tfs.errors.DataError(
      f'Expected a full batch with --strategy=mirrored, got {n} examples for '
      f'batches of {batch}. Fix: pass a smaller --global_batch_size.'
    )
  steps = FLAGS.steps_per_epoch or (
    n // batch if full else math.ceil(n / batch)
  )
  group = _optional_flag('steps_per_execution') or 1
  if steps < group:
    raise tfs.errors.DataError(
      f'Expected at least --steps_per_execution={group} steps in an epoch, got '
      f'{steps}. Fix: pass --steps_per_execution={steps} at most.'
    )
  return steps - steps % group


def images_in_steps(data, steps: int) -> int:
  """Returns the images in the first steps of a run: the last of a pass has less."""
  batch, n = FLAGS.global_batch_size, data.train.num_examples
  if pipeline_options().drop_remainder:
    return steps * batch
  passes, rest = divmod(steps, math.ceil(n / batch))
  return passes * n + rest * batch


def checkpoint_settings(strategy, data) -> dict[str, Any]:
  """Returns what two runs must have in common for one to continue the other.

  The strategy may differ, and so may the number of replicas.
  """
  names = (
    *('dataset', 'model', 'dropout', 'global_batch_size', 'optimizer'),
    *('warmup_steps', 'mixed_precision', 'seed'),
  )
  return {
    **{name: FLAGS[name].value for name in names},
    'train_examples': data.train.num_examples,
    'steps_per_epoch': steps_per_epoch(data),
    'full_batches': pipeline_options().drop_remainder,
    'learning_rate': learning_rate(strategy),
  }


def evaluate_checkpoints(build_model: Callable, test_batches: Callable) -> None:
  """Evaluates each checkpoint on one device: the part of an evaluator.

  Args:
    build_model: makes the model from a strategy and the number of classes.
    test_batches: makes the batches from the data.
  """
  if not FLAGS.checkpoint_dir:
    print('This evaluator has nothing to do without --checkpoint_dir.')
    return
  import keras

  from examples import datasets

  strategy = tfs.create_strategy('one_device')
  data = datasets.load(FLAGS.dataset, FLAGS.data_path)
  model = build_model(strategy, data.num_classes)
  if not model.compiled:  # For a custom loop.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(build_optimizer(strategy), loss, metrics=['accuracy'])
  log_dir = FLAGS.log_dir if can_log(strategy) else None
  tfs.SidecarEvaluator(
    model, test_batches(data), FLAGS.checkpoint_dir, log_dir=log_dir
  ).run()


def is_chief(strategy) -> bool:
  """Returns whether this process shows progress and writes files.

  Results of metrics must be read on all workers: each has a part.
  """
  return strategy.extended.should_checkpoint


def has_servers(strategy) -> bool:
  """Returns whether the variables are on parameter servers."""
  return isinstance(strategy, tfs.ParameterServerStrategy)


def has_step(strategy) -> bool:
  """Returns whether `strategy.step` computes a step as one device would."""
  is_ours = type(strategy).__module__.startswith('tf_strategies.')
  return is_ours and not isinstance(strategy, tfs.TPURingStrategy)


def join(strategy) -> None:
  """Waits for steps that still run, where workers run them."""
  if has_servers(strategy):
    strategy.join()


def can_log(strategy) -> bool:
  """Returns whether to write TensorBoard logs; warns if it is not installed."""
  if not FLAGS.log_dir or not is_chief(strategy):
    return False
  if importlib.util.find_spec('tensorboard') is None:
    print(
      f'--log_dir={FLAGS.log_dir} gets no curves: TensorBoard is not '
      'installed, run `pip install tensorboard`.'
    )
    return False
  return True
