"""Shared code of the MNIST examples: flags, and the objects that they configure.

Flags of a single example are defined in its file. TensorFlow is imported inside
functions, so that `--help` and flag errors are quick.
"""

from __future__ import annotations

import atexit
import collections
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

import numpy as np
from absl import app, flags

import tf_strategies as tfs
from tf_strategies.cluster import exit_codes

FLAGS = flags.FLAGS
STRATEGIES = (
  *('one_device', 'mirrored', 'ring_mirrored', 'central_storage', 'tpu_ring'),
  *('multi_worker_ring', 'multi_worker_collective', 'parameter_server'),
)
_DATASETS = ('mnist', 'digits', 'synthetic')
# Enough for 97% on digits and 98.5% on MNIST. Synthetic images only show the speed.
_EPOCHS = {'mnist': 3, 'digits': 12, 'synthetic': 1}
_LEARNING_RATES = {'sgd': 0.02, 'adam': 1e-3}
# auto chooses by device. builtin is TensorFlow's own.
_ALL_REDUCES = (
  *('auto', 'ring', 'direct', 'tree', 'halving_doubling', 'hierarchical'),
  *('naive', 'builtin'),
)
_POLICIES = ('float32', 'mixed_float16', 'mixed_bfloat16')
_MODES = ('async', 'sync', 'bounded')

# Data and model.
flags.DEFINE_enum('dataset', 'mnist', _DATASETS, 'Data set.')
flags.DEFINE_string('data_path', None, 'MNIST: .npz file, IDX or TFRecord dir.')
flags.DEFINE_enum(
  'model', 'cnn', ['cnn', 'mlp'], 'Network. mlp is 784-16-16-10.'
)
flags.DEFINE_float('dropout', 0, 'Rate in the last hidden layer.', 0, 0.99)
flags.DEFINE_enum('optimizer', 'sgd', ['sgd', 'adam'], 'SGD has momentum 0.9.')
flags.DEFINE_float('learning_rate', None, 'Default: by optimizer.', 1e-12)
flags.DEFINE_bool(
  'scale_learning_rate', False, 'Multiply it by the number of replicas.'
)
flags.DEFINE_integer('warmup_steps', 0, 'Steps of a linear warm-up.', 0)
flags.DEFINE_enum('mixed_precision', 'float32', _POLICIES, 'Dtype policy.')
flags.DEFINE_integer('seed', 0, 'Seed of weights and shuffling.', 0, 2**31 - 1)
flags.DEFINE_integer('global_batch_size', 64, 'Images per step.', 1)
flags.DEFINE_integer('epochs', None, 'Default: 3 for MNIST, 12 for digits.', 0)
flags.DEFINE_integer(
  'steps_per_epoch',
  None,
  'Default: one pass over the data. After more or fewer steps, the next epoch '
  'continues where this one ended.',
  1,
)
flags.DEFINE_string('checkpoint_dir', None, 'Save here, resume from here.')
flags.DEFINE_integer('checkpoint_steps', 1000, 'Steps between checkpoints.', 1)
# The strategy.
flags.DEFINE_enum('strategy', 'ring_mirrored', STRATEGIES, 'Strategy.')
flags.DEFINE_integer(
  'num_virtual_devices',
  0,
  'Split the GPU, or without a GPU the CPU, into this many logical devices. '
  '0 uses the devices unchanged.',
  0,
)
flags.DEFINE_enum(
  'all_reduce',
  'auto',
  _ALL_REDUCES,
  "For ring_mirrored and mirrored. builtin (only mirrored) is TensorFlow's.",
)
flags.DEFINE_integer(
  'local_steps', None, 'Steps between synchronisations (LocalSteps).', 1
)
flags.DEFINE_bool('worker_input', False, 'Workers read their training data.')
# Parameter servers.
flags.DEFINE_enum('mode', 'async', _MODES, 'When a gradient is applied.')
flags.DEFINE_integer(
  'backup_workers', 0, 'Number of workers that may be late (sync).', 0
)
flags.DEFINE_integer(
  'max_staleness', 1, 'Maximum steps ahead of the slowest worker (bounded).', 0
)
flags.DEFINE_integer('variable_partitions', 0, 'Parts of a large variable.', 0)
# Output.
flags.DEFINE_bool('verbose', True, 'Show progress.')
flags.DEFINE_string('report_json', None, 'Write the report of the run here.')
flags.DEFINE_string(
  'save_weights',
  None,
  'Write the final weights to this .npz file. If its name contains {rank}, '
  'every worker writes one.',
)
flags.DEFINE_float('min_accuracy', 0, 'Below it, exit with status 2.', 0, 1)
flags.DEFINE_string(
  'log_dir',
  None,
  'Write TensorBoard logs here.',
  # absl.logging has a flag with this name, which is not used here.
  allow_override=True,
)
flags.DEFINE_string('timeline', None, 'Write a timeline for each rank.')


@flags.validator('log_dir', 'needs TensorBoard: run `pip install tensorboard`.')
def _check_log_dir(value):
  return not value or importlib.util.find_spec('tensorboard') is not None


@flags.multi_flags_validator(
  ['all_reduce', 'strategy'],
  '--all_reduce=builtin works with --strategy=mirrored only.',
)
def _check_all_reduce(values):
  return values['all_reduce'] != 'builtin' or values['strategy'] == 'mirrored'


def run(main: Callable[[], Mapping[str, Any] | None]) -> None:
  """Parses the flags, calls `main`, which returns a report, and exits.

  The exit status is 0 on success. It is 1, with a message, if flags, data or
  checkpoints are invalid; 2 if the test accuracy is below --min_accuracy; and 143
  after a preemption or the loss of a worker, when a restart may help.
  """
  app.run(lambda argv: _run(argv, main))


def _run(argv, main) -> int:
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {" ".join(argv[1:])}')
  set_defaults()
  import_tensorflow()
  try:
    found = main()
  except tfs.errors.Error as e:
    # The message is meant for users, who do not need a traceback.
    print(f'{type(e).__name__}: {e}', file=sys.stderr)
    return exit_codes.exit_code(e)
  if found is None or not found['is_chief']:
    return 0
  accuracy, least = found['test']['accuracy'], FLAGS.min_accuracy
  if accuracy < least:
    print(f'Accuracy {accuracy:.4f} < --min_accuracy={least}.', file=sys.stderr)
  return 2 if accuracy < least else 0


def set_defaults() -> None:
  """Sets the flags whose defaults depend on other flags."""
  FLAGS.epochs = FLAGS.epochs or _EPOCHS[FLAGS.dataset]
  if FLAGS.learning_rate is None:
    FLAGS.learning_rate = _LEARNING_RATES[FLAGS.optimizer]


def import_tensorflow() -> None:
  """Imports TensorFlow without log lines that no setting turns off."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  shown = os.dup(2)
  try:
    with open(os.devnull, 'w') as nowhere:
      os.dup2(nowhere.fileno(), 2)
    importlib.import_module('tensorflow')
  finally:
    os.dup2(shown, 2)
    os.close(shown)


def create_strategy():
  """Returns the strategy of --strategy. Call it before TensorFlow starts."""
  import tensorflow as tf

  options = {}
  if FLAGS.num_virtual_devices:
    options['devices'] = devices()
  if FLAGS.strategy in ('ring_mirrored', 'mirrored'):
    if FLAGS.all_reduce == 'auto':
      options['cross_device_ops'] = tfs.AutoAllReduce()
    elif FLAGS.all_reduce != 'builtin':
      options['cross_device_ops'] = tfs.ScheduledAllReduce(FLAGS.all_reduce)
  if FLAGS.strategy == 'parameter_server':
    names = ('mode', 'backup_workers', 'max_staleness')
    names += ('checkpoint_dir', 'checkpoint_steps')
    options |= {name: FLAGS[name].value for name in names}
    if FLAGS.variable_partitions:
      # Each part of a variable costs a message. In these models only the kernel of
      # the hidden layer (256 KiB) is large enough to be split.
      partitioners = tf.distribute.experimental.partitioners
      options['variable_partitioner'] = partitioners.MinSizePartitioner(
        64 << 10, FLAGS.variable_partitions
      )
  strategy = tfs.create_strategy(FLAGS.strategy, **options)
  if isinstance(strategy, tfs.ParameterServerStrategy):
    atexit.register(strategy.close)
  if FLAGS.strategy == 'tpu_ring' or not hasattr(strategy, 'step'):
    # TensorFlow's strategies have no `step`, so their replicas run the step.
    strategy.step = lambda step, optimizers=(): tf.function(
      lambda batch: strategy.run(step, (batch,))
    )
  return strategy


def devices() -> list[str] | None:
  """Returns the logical devices of --num_virtual_devices, or None for all devices.

  They are parts of the first GPU or, without a GPU, of the CPU.

  Raises:
    UnsupportedOptionError: if TensorFlow already runs with other devices.
  """
  import tensorflow as tf

  if not FLAGS.num_virtual_devices:
    return None
  gpus = tf.config.list_physical_devices('GPU')
  physical = gpus[0] if gpus else tf.config.list_physical_devices('CPU')[0]
  # TensorFlow requires a limit for each virtual GPU. Two gigabytes are many
  # times what these models need, and eight such devices fit on a 16 GB card.
  part = tf.config.LogicalDeviceConfiguration(2048 if gpus else None)
  parts = [part] * FLAGS.num_virtual_devices
  try:
    tf.config.set_logical_device_configuration(physical, parts)
  except RuntimeError as e:
    raise tfs.errors.UnsupportedOptionError(
      f'--num_virtual_devices={len(parts)} after it',
      'devices() before the first operation of TensorFlow',
      'call it first',
    ) from e
  return [f'{physical.device_type}:{i}' for i in range(len(parts))]


def load_data(steps_per_execution: int = 1):
  """Loads --dataset, and sets --steps_per_epoch to whole groups of steps.

  Otherwise Keras would complete a group of steps with the next epoch.

  Raises:
    DataError: if the data is less than one full batch or one group of steps.
  """
  from examples import datasets

  data = datasets.load(FLAGS.dataset, FLAGS.data_path)
  one_pass = tfs.data.make_dataset(data.train, _pipeline(), training=True)
  steps = FLAGS.steps_per_epoch or int(one_pass.cardinality())
  if steps < steps_per_execution:
    raise tfs.errors.DataError(
      f'Expected at least --steps_per_execution={steps_per_execution} steps in '
      f'an epoch, got {steps}. Fix: pass --steps_per_execution={steps} at most.'
    )
  FLAGS.steps_per_epoch = steps - steps % steps_per_execution
  return data


def _pipeline() -> tfs.data.PipelineOptions:
  """Returns the options of the training batches.

  TensorFlow's own mirrored strategy only gets full batches: a replica with fewer
  rows would count too much, and a replica without rows can abort the process in
  the gradient of max pooling.
  """
  return tfs.data.PipelineOptions(
    FLAGS.global_batch_size,
    seed=FLAGS.seed,
    drop_remainder=FLAGS.strategy == 'mirrored',
  )


def train_batches(strategy, data, start: Iterable[int] = (0, 0)):
  """Returns the batches from (epoch, step) on, as in an uninterrupted run.

  Returns a `tf.data.Dataset`, or with --worker_input a distributed dataset whose
  parts the workers read themselves.
  """

  def make(context=None):
    return tfs.data.make_dataset(
      data.train,
      _pipeline(),
      training=True,
      epochs=FLAGS.epochs,
      start=start,
      steps_per_epoch=FLAGS.steps_per_epoch,
      input_context=context,
    )

  if FLAGS.worker_input:
    return strategy.distribute_datasets_from_function(make)
  return make()


def test_batches(data):
  """Returns the batches of the test split, in order."""
  options = tfs.data.PipelineOptions(global_batch_size=512)
  return tfs.data.make_dataset(data.test, options, training=False)


def build_model(num_classes: int):
  """Returns the network of --model, from images to logits. It is not compiled."""
  import keras
  from keras import layers

  keras.utils.set_random_seed(FLAGS.seed)
  keras.config.set_dtype_policy(FLAGS.mixed_precision)
  if FLAGS.model == 'mlp':  # Small and fast.
    hidden = [
      layers.Flatten(),
      layers.Dense(16, activation='relu', name='hidden_1'),
      layers.Dense(16, activation='relu', name='hidden_2'),
    ]
  else:
    hidden = [
      layers.Conv2D(16, 5, activation='relu', name='conv_1'),
      layers.MaxPooling2D(2),
      layers.Conv2D(32, 5, activation='relu', name='conv_2'),
      layers.MaxPooling2D(2),
      layers.Flatten(),
      layers.Dense(128, activation='relu', name='hidden'),
    ]
  return keras.Sequential(
    [
      keras.Input([28, 28, 1]),
      *hidden,
      layers.Dropout(FLAGS.dropout),
      # float32 also in mixed precision, since a 16-bit softmax is inaccurate.
      layers.Dense(num_classes, dtype='float32', name='logits'),
    ],
    name=FLAGS.model,
  )


def build_optimizer():
  """Returns the Keras optimizer of the flags. Call it in the strategy's scope."""
  import keras
  import tensorflow as tf

  rate = FLAGS.learning_rate
  if FLAGS.scale_learning_rate:
    rate *= tf.distribute.get_strategy().num_replicas_in_sync
  if FLAGS.warmup_steps:  # The rate of the first step is rate / warmup_steps.
    rate = keras.optimizers.schedules.PolynomialDecay(
      rate / FLAGS.warmup_steps, max(1, FLAGS.warmup_steps - 1), rate
    )
  if FLAGS.optimizer == 'sgd':
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, name='sgd')
  else:
    optimizer = keras.optimizers.Adam(rate, name='adam')
  if FLAGS.local_steps:
    optimizer = tfs.keras.LocalSteps(optimizer, FLAGS.local_steps)
  return optimizer


def resume(data, model, metrics=None) -> tuple[tfs.Run | None, tuple[int, int]]:
  """Returns the run in --checkpoint_dir, if any, and its next (epoch, step).

  A run can continue a checkpoint with the same settings, optimizer and seed. The
  strategy and the number of replicas may differ. A custom loop passes its `metrics`.
  """
  if not FLAGS.checkpoint_dir:
    return None, (0, 0)
  names = ('dataset', 'model', 'dropout', 'mixed_precision')
  names += ('global_batch_size', 'steps_per_epoch')
  settings = {name: FLAGS[name].value for name in names}
  settings['train_examples'] = data.train.num_examples
  settings['full_batches'] = _pipeline().drop_remainder
  run = tfs.Run(FLAGS.checkpoint_dir, model, settings=settings, metrics=metrics)
  epoch, step = run.restore()
  if metrics:  # For a loop, parameter servers count the steps of all epochs.
    steps = FLAGS.steps_per_epoch
    epoch, step = divmod(epoch * steps + step, steps)
  return run, (epoch, step)


def evaluate_checkpoints() -> None:
  """Evaluates each checkpoint on one device, as the evaluator task."""
  if not FLAGS.checkpoint_dir:
    print('This evaluator has nothing to do without --checkpoint_dir.')
    return
  import keras

  data = load_data()
  model = build_model(data.num_classes)
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(build_optimizer(), loss, metrics=['accuracy'])
  callbacks = []
  if FLAGS.log_dir:
    callbacks.append(keras.callbacks.TensorBoard(FLAGS.log_dir))
  tfs.SidecarEvaluator(
    model, test_batches(data), FLAGS.checkpoint_dir, callbacks
  ).run()


def end_epoch(strategy, optimizer) -> None:
  """Completes pending steps of a custom loop, so that results can be read."""
  if isinstance(strategy, tfs.ParameterServerStrategy):
    strategy.join()  # Workers may still be computing steps.
  if FLAGS.local_steps:  # Workers average their weights.
    if FLAGS.mixed_precision == 'mixed_float16':  # `compile` scales the loss.
      optimizer = optimizer.inner_optimizer
    optimizer.meet()


def is_chief(strategy) -> bool:
  """Returns whether this process shows progress and writes files."""
  return strategy.extended.should_checkpoint


def verbosity(strategy) -> int:
  """Returns `verbose` for Keras. The chief prints a line for each epoch."""
  return 2 if FLAGS.verbose and is_chief(strategy) else 0


def callbacks(strategy) -> list:
  """Returns the callbacks of --log_dir and --timeline.

  Create them before distributing data, so that the timeline includes the input.
  """
  import keras

  found = []
  if FLAGS.log_dir and is_chief(strategy):
    found.append(keras.callbacks.TensorBoard(FLAGS.log_dir))
  if FLAGS.timeline:
    found.append(tfs.MonitorCallback(FLAGS.timeline))
  return found


def callback_list(strategy, model):
  """Returns the callbacks of a custom loop, which show progress like `fit`."""
  import keras

  return keras.callbacks.CallbackList(
    callbacks(strategy),
    add_progbar=True,
    model=model,
    epochs=FLAGS.epochs,
    steps=FLAGS.steps_per_epoch,
    verbose=verbosity(strategy),
  )


def report(
  data, model, metrics, logs: Mapping[str, float], start: tuple[int, int]
) -> dict[str, Any]:
  """Prints and returns the report. Writes --report_json and --save_weights.

  Args:
    data: result of `load_data`.
    model: the trained model with its optimizer.
    metrics: metrics of the model.
    logs: results of the last epoch, named as in Keras's history. Contains only the
      test results if all epochs were completed in an earlier run.
    start: (epoch, step) at which this run started.
  """
  from tf_strategies.checkpoint import model_state

  strategy, optimizer = model.distribute_strategy, model.optimizer
  done = start[0] * FLAGS.steps_per_epoch + start[1]
  steps = max(done, FLAGS.epochs * FLAGS.steps_per_epoch)
  variables = [*model.variables, *optimizer.variables]
  # A compiled model also has a mean of the loss.
  kept = [*metrics, *model.metrics]
  variables += [v for metric in kept for v in metric.variables]
  test = {name[4:]: v for name, v in logs.items() if name.startswith('val_')}
  train = {name: v for name, v in logs.items() if name in test}
  found = {
    'is_chief': is_chief(strategy),
    'dataset': data.name,
    'replicas': strategy.num_replicas_in_sync,
    'devices': list(strategy.extended.worker_devices),
    'parameters': model.count_params(),
    'steps': steps,
    'steps_this_run': steps - done,
    'iterations': int(optimizer.iterations.numpy()),
    'train': train or None,
    'test': test,
    'all_reduce': None,  # TensorFlow's own is not counted.
    'parameter_server': None,
    'variable_bytes': _variable_bytes(strategy, variables),
  }
  tasks = f'replicas: {found["replicas"]}'
  if hasattr(strategy, 'communication_report'):
    found['all_reduce'] = strategy.communication_report()
  if isinstance(strategy, tfs.ParameterServerStrategy):
    jobs = strategy.cluster.jobs
    counts = {'workers': len(jobs['worker']), 'servers': len(jobs['ps'])}
    found['parameter_server'] = {**counts, **strategy.report()}
    tasks = f'workers: {counts["workers"]}, servers: {counts["servers"]}'
  if found['is_chief']:
    print(
      f'Trained {steps:,} steps on {data.name} with {FLAGS.strategy} ({tasks}): '
      f'test accuracy {test["accuracy"]:.4f}, loss {test["loss"]:.4f}.',
      flush=True,
    )
    if FLAGS.report_json:
      with _create(FLAGS.report_json) as f:
        f.write(json.dumps(found, indent=2).encode())
  path = FLAGS.save_weights or ''
  if path and (found['is_chief'] or '{rank}' in path):
    rank = getattr(strategy, 'rank', 0)
    with _create(path.replace('{rank}', str(rank))) as f:
      named = model_state.name_variables(model, optimizer)
      np.savez(f, **{name: v.value.numpy() for name, v in named.items()})
  return found


def _variable_bytes(strategy, variables: Iterable[Any]) -> dict[str, int]:
  """Returns the bytes of all copies and parts of variables, by device."""
  total = collections.Counter()
  for variable in {id(v): v for v in variables}.values():
    parts = getattr(variable.value, 'parts', None)
    for part in parts or strategy.experimental_local_results(variable.value):
      total[part.device] += part.shape.num_elements() * part.dtype.size
  return dict(total)


def _create(path: str) -> IO[bytes]:
  """Creates a file, and its directory."""
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  return open(path, 'wb')
