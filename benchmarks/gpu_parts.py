"""The processes that `benchmarks.gpu` starts. Each public function is one of them.

A process prints each figure as a line of JSON as soon as it exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Functions import TensorFlow or torch: no process needs both.
from benchmarks import measure

# By job: strategies with the numbers of used and of all devices. XLA takes more than a
# minute for each strategy, so it compiles only those of the first job.
STEPS = (
  (
    ('none', 1, 1),
    ('ring_mirrored', 1, 1),
    ('ring_mirrored', 2, 2),
    ('multi_worker_ring', 1, 1),
  ),
  (
    ('none', 1, 1),
    ('ring_mirrored', 4, 4),
    ('mirrored', 1, 1),
    ('mirrored', 2, 2),
    ('central_storage', 2, 2),
    ('multi_worker_collective', 1, 1),
  ),
)
SIZES = {
  'gpu': {
    'transformer': {'length': 256, 'width': 768, 'layers': 12, 'words': 16_000},
    # Rows of a batch of the transformer, and of the dense model.
    'rows': (16, 512),
    'dense': {'width': 1250, 'layers': 4},
    'steps': 20,
    'sets': ['25x1MB', '1x25MB', '1x400MB'],
    'copies': [2**n for n in (2, 12, 16, 20, 24, 28)],
    'rounds': 4,
  },
  'cpu': {
    'transformer': {'length': 8, 'width': 16, 'layers': 1, 'words': 50},
    'rows': (4, 8),
    'dense': {'width': 64, 'layers': 2},
    'steps': 3,
    'sets': ['4x64KB', '1x64KB'],
    'copies': [4, 4096, 65536],
    'rounds': 1,
  },
}
_WARMUP = 3
# GPU memory that the virtual GPUs share.
_GIGABYTES = 64.0


@dataclasses.dataclass(frozen=True)
class Job:
  """A job of `benchmarks.gpu`.

  Attributes:
    device: 'cpu' or 'gpu'.
    number: number of the job in its part.
    began: monotonic time at which its processes were started.
    ends_at: monotonic time at which they are ended.
    data_path: path of MNIST, or None if it is missing.
    index: number of the process in its job.
    directory: directory in which the processes of a job wait for each other.
  """

  device: str
  number: int
  began: float
  ends_at: float
  data_path: str | None
  index: int
  directory: str

  @property
  def size(self) -> dict[str, Any]:
    """Returns the sizes of the measured models."""
    return SIZES[self.device]


def startup(job: Job) -> None:
  """Measures the seconds until a process has run an operation."""
  import tensorflow as tf

  _emit(until='TensorFlow is imported', seconds=time.monotonic() - job.began)
  import tf_strategies as tfs

  tfs.create_strategy('one_device')  # Triggers late imports now.
  _emit(until='tf_strategies is too', seconds=time.monotonic() - job.began)
  with tf.device(f'{job.device}:0'):
    (tf.ones([64, 64]) @ tf.ones([64, 64])).numpy()
  _emit(until='an operation has run', seconds=time.monotonic() - job.began)
  _emit_environment()


def transformer(length: int, width: int, layers: int, words: int):
  """Returns a causal language model."""
  import keras

  head = min(64, width)
  tokens = keras.layers.Input([length], dtype='int32')
  x = keras.layers.Embedding(words, width)(tokens)
  for _ in range(layers):
    y = keras.layers.LayerNormalization()(x)
    attention = keras.layers.MultiHeadAttention(width // head, head)
    x = x + attention(y, y, use_causal_mask=True)
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.Dense(4 * width, activation='gelu')(y)
    x = x + keras.layers.Dense(width)(y)
  logits = keras.layers.Dense(words, dtype='float32')(x)
  return keras.Model(tokens, logits)


def step(job: Job) -> None:
  """Trains the transformer under the strategy of this process.

  The processes of the job compile at the same time, but are timed one by one.
  """
  name, used, count = STEPS[job.number][job.index]
  devices = _split(job, count)
  import keras
  import tensorflow as tf

  keras.mixed_precision.set_dtype_policy('mixed_bfloat16')
  size = job.size['transformer']
  shape = [job.size['rows'][0], size['length']]
  tokens = np.random.default_rng(1).integers(0, size['words'], shape)
  data = tf.data.Dataset.from_tensors((tokens, tokens)).repeat()
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  strategy = strategy_named(name, devices[:used])
  for is_xla in (False, True)[: 2 - job.number]:
    row = {'strategy': name, 'parts': f'{used} of {count}', 'xla': is_xla}
    with _wait_at_exit(job, f'timed {is_xla}'), _reported(row):
      with _wait_at_exit(job, f'ready {is_xla}'):
        idle = _gigabytes(devices, 'current')
        keras.utils.set_random_seed(1)
        with strategy.scope():
          model = transformer(**size)
          model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=is_xla)
        began = time.monotonic()
        _fit(model, data, 1)
        row['compile_seconds'] = time.monotonic() - began
      _wait(job, f'timed {is_xla}', job.index)
      row |= _fit(model, data, job.size['steps'])
      row['peak_gigabytes'] = _gigabytes(devices, 'peak') - idle


@contextlib.contextmanager
def _wait_at_exit(job: Job, name: str) -> Iterator[None]:
  """Waits for the other processes of the job at exit, even if the body raises."""
  try:
    yield
  finally:
    pathlib.Path(job.directory, f'{name} {job.index}').touch()
    _wait(job, name, len(STEPS[job.number]))


def _wait(job: Job, name: str, count: int) -> None:
  """Waits for the first `count` processes, for at most 0.7 of the remaining time."""
  give_up_at = 0.3 * time.monotonic() + 0.7 * job.ends_at
  paths = [pathlib.Path(job.directory, f'{name} {i}') for i in range(count)]
  while time.monotonic() < give_up_at and not all(p.exists() for p in paths):
    time.sleep(0.05)


def workers(job: Job) -> None:
  """Trains a dense model on two workers: independently, then together."""
  if job.number == 0:
    return _torch_worker(job)
  devices = _split(job, 1)
  import tensorflow as tf

  ring = strategy_named('multi_worker_ring', devices)
  alone: dict[bool, float] = {}
  for strategy in (tf.distribute.get_strategy(), ring):
    for is_xla in (False, True):
      peer = 'ring' if strategy is ring else 'none'
      row = {'by': 'tf_strategies', 'peer': peer, 'xla': is_xla}
      with _reported(row):
        model, data = _dense(strategy, job, is_xla)
        _fit(model, data, 1)
        # Each worker is timed while the other one is busy too.
        ring.process_group.barrier(name=f'{peer} {is_xla}')
        row |= _fit(model, data, job.size['steps'])
        median = row['median_ms']
        row['exposed_ms'] = median - alone.setdefault(is_xla, median)


def _torch_worker(job: Job) -> None:
  if importlib.util.find_spec('torch') is None:
    return _emit(by='torch', skipped='torch is not installed')
  import torch

  task = json.loads(os.environ['TF_CONFIG'])
  os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
  torch.distributed.init_process_group(
    'gloo',
    f'tcp://{task["cluster"]["worker"][0]}',
    rank=task['task']['index'],
    world_size=2,
  )
  torch_device = torch.device('cuda:0' if job.device == 'gpu' else 'cpu')
  width, layers = job.size['dense'].values()
  x = torch.randn(job.size['rows'][1], width, device=torch_device)
  alone = None
  for name in ('none', 'DDP'):
    modules = [torch.nn.Linear(width, width)]
    for _ in range(layers - 1):
      modules += [torch.nn.ReLU(), torch.nn.Linear(width, width)]
    net = torch.nn.Sequential(*modules).to(torch_device)
    if name == 'DDP':
      net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    torch.distributed.barrier()
    times = []
    for _ in range(_WARMUP + job.size['steps']):
      optimizer.zero_grad()
      loss = torch.nn.functional.mse_loss(net(x), x.tanh())
      loss.backward()
      optimizer.step()
      loss.item()  # Waits for the GPU.
      times.append(time.perf_counter())
    row = {'by': 'torch', 'peer': name, 'xla': False, **_spread(times)}
    alone = alone or row['median_ms']
    _emit(**row, exposed_ms=row['median_ms'] - alone)


def all_reduce(job: Job) -> None:
  """Reduces each set of tensors over two or four devices, with all peers in turns."""
  devices = _split(job, (2, 4)[job.number])
  from benchmarks import all_reduce as benchmark

  strategies: dict[str, Any] = {}
  for name in job.size['sets']:
    for row in benchmark.measure_set(
      name, devices, job.size['rounds'], 3, strategies
    ):
      _emit(**row)


def links(job: Job) -> None:
  """Measures the constants of copies between devices, and device and host."""
  devices = _split(job, 2)
  from benchmarks import gpu_links

  for row in gpu_links.measure_copies(
    devices, job.size['copies'], job.size['rounds']
  ):
    _emit(**row)


def mnist(job: Job) -> None:
  """Runs an example to its accuracy, on MNIST or else scikit-learn's digits."""
  example = ('mnist_keras_fit', 'mnist_custom_loop')[job.number]
  words = ['--dataset=digits', '--min_accuracy=0.9']
  if job.data_path:
    words = [f'--data_path={job.data_path}', '--min_accuracy=0.985']
    # A quarter of the steps of the example's default.
    words += ['--global_batch_size=256', '--scale_learning_rate']
    words += ['--warmup_steps=100']
  elif importlib.util.find_spec('sklearn') is None:
    return _emit(example=example, skipped='no --data_path, no scikit-learn')
  with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, 'report.json')
    sys.argv[1:] = ['--num_virtual_devices=4', '--noverbose', *words]
    sys.argv.append(f'--report_json={path}')
    try:
      runpy.run_module(f'examples.{example}', run_name='__main__')
    except SystemExit as e:
      if e.code:
        raise
    with open(path, encoding='utf-8') as file:
      report = json.load(file)
  _emit(
    example=example,
    dataset=report['dataset'],
    accuracy=report['test']['accuracy'],
    seconds=time.monotonic() - job.began,
  )


def servers(job: Job) -> None:
  """Trains a dense model with a parameter server, or serves, according to TF_CONFIG."""
  import tensorflow as tf

  config = json.loads(os.environ['TF_CONFIG'])
  task = config['task']
  if task['type'] != 'chief':
    cluster = tf.train.ClusterSpec(config['cluster'])
    tf.distribute.Server(cluster, task['type'], task['index']).join()
  _split(job, 1)
  import tf_strategies as tfs

  alone = None
  for mode in ('none', 'sync', 'async'):
    # In a synchronous step each of the two workers trains on a batch.
    rows = job.size['rows'][1] * (2 if mode == 'sync' else 1)
    row = {'mode': mode, 'rows': rows}
    with _reported(row):
      strategy = tf.distribute.get_strategy()
      if mode != 'none':
        strategy = tfs.ParameterServerStrategy(mode=mode)
      model, data = _dense(strategy, job, False)
      row |= _fit(model, data, 4, block=job.size['steps'])
      row['ms_per_1000_rows'] = per_row = 1e3 * row['median_ms'] / rows
      alone = alone or per_row
      row['ratio_to_none'] = per_row / alone


def _split(job: Job, count: int) -> list[str]:
  devices = measure.split_device(job.device, count, _GIGABYTES / count)
  _emit_environment()
  return devices


def _emit_environment() -> None:
  import keras

  from benchmarks import report

  environment = report.environment()
  environment['versions']['keras'] = keras.__version__
  _emit(environment=environment)


def _fit(model, data, samples: int, block: int = 1) -> dict[str, Any]:
  """Trains, and returns the spread of a step's time and the mean loss.

  A sample is a step, or a block of steps that do not wait for each other.
  """
  import keras

  times: list[float] = []

  def note(number, logs=None):
    getattr(model.distribute_strategy, 'join', int)()
    times.append(time.perf_counter() / block)

  # Keras reads the loss before either callback, which waits for the GPU.
  clock, lengths = {'on_epoch_end': note}, (samples + _WARMUP, block)
  if block == 1:
    clock, lengths = {'on_train_batch_end': note}, (1, samples + _WARMUP)
  history = model.fit(
    data,
    epochs=lengths[0],
    steps_per_epoch=lengths[1],
    verbose=0,
    callbacks=[keras.callbacks.LambdaCallback(**clock)],
  )
  return {**_spread(times), 'loss': history.history['loss'][-1]}


def _spread(times: Sequence[float]) -> dict[str, Any]:
  """Returns the fields of `measure.Spread`, without the first steps."""
  seconds = np.diff(times)[_WARMUP - 1 :]
  return dataclasses.asdict(measure.Spread.of(seconds))


def _dense(strategy, job: Job, is_xla: bool):
  """Returns a dense model and a data set with batches for one worker."""
  import keras
  import tensorflow as tf

  width, layers = job.size['dense'].values()
  with strategy.scope():
    model = keras.Sequential([keras.Input([width])])
    for _ in range(layers - 1):
      model.add(keras.layers.Dense(width, 'relu'))
    model.add(keras.layers.Dense(width))
    model.compile('sgd', 'mse', jit_compile=is_xla)

  def batches(context=None):
    x = tf.random.stateless_normal([job.size['rows'][1], width], [1, 2])
    return tf.data.Dataset.from_tensors((x, tf.tanh(x))).repeat()

  if strategy is tf.distribute.get_strategy():
    return model, batches()
  return model, strategy.distribute_datasets_from_function(batches)


def strategy_named(name: str, devices: Sequence[str]):
  """Returns the named strategy on these devices. 'none' is the default strategy."""
  import tensorflow as tf

  import tf_strategies as tfs

  if name == 'none':
    return tf.distribute.get_strategy()
  if name == 'mirrored':
    return tf.distribute.MirroredStrategy(list(devices))
  return tfs.create_strategy(name, devices=list(devices))


def _gigabytes(devices: Sequence[str], which: str) -> float | None:
  """Returns the used memory of the GPUs. 'current' also resets the peak."""
  import tensorflow as tf

  memory = tf.config.experimental
  if devices[0].startswith('CPU'):
    return 0.0
  found = sum(memory.get_memory_info(d)[which] for d in devices) / 1e9
  if which == 'current':
    for name in devices:
      memory.reset_memory_stats(name)
  return found


@contextlib.contextmanager
def _reported(row: dict[str, Any]) -> Iterator[None]:
  """Prints the row after the body has completed it, with the error if it raises."""
  try:
    yield
  except Exception as e:
    traceback.print_exc()
    # TensorFlow's strategy may not support the step.
    key = 'skipped' if row.get('strategy') == 'mirrored' else 'error'
    row[key] = f'{type(e).__name__}: {str(e)[-300:]}'
  _emit(**row)


def _emit(**row: Any) -> None:
  print(json.dumps(row), flush=True)


def main(argv: Sequence[str]) -> None:
  """Runs the process of a part.

  Args:
    argv: the program's name, the part, and the fields of its `Job` as JSON.
  """
  globals()[argv[1]](Job(**json.loads(argv[2])))
  # The shutdown of TensorFlow may take seconds.
  os._exit(0)


if __name__ == '__main__':
  main(sys.argv)
