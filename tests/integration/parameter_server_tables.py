"""Programs of a chief with large tables, whose tasks tests watch and kill."""

import os
import threading
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests.integration import parameter_server_programs as programs
from tf_strategies.checkpoint import checkpointer, pieces
from tf_strategies.strategies.parameter_server import table_files

tell = programs.tell


def memory(pid: int | None = None) -> int:
  """Returns the bytes of a process in memory, without mapped files."""
  with open(f'/proc/{pid or "self"}/status') as f:
    for line in f:
      if line.startswith('RssAnon'):
        return int(line.split()[1]) * 1024
  raise AssertionError('no RssAnon')


class Peak:
  """Measures the peak memory of this process inside a context."""

  def __enter__(self):

    self.before = self.largest = memory()
    self._is_over = threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def _watch(self):
    while not self._is_over.wait(0.005):
      self.largest = max(self.largest, memory())

  def __exit__(self, *unused):
    self._is_over.set()
    self._thread.join()

  @property
  def growth(self) -> int:
    return max(self.largest, memory()) - self.before


def make(rows: int, width: int, optimizer: str = 'adam', **options: Any):
  """Returns a strategy, and a model with a table of seeded values in its scope.

  The table is looked up on the server, as `tf.nn.embedding_lookup` does.
  """

  class Lookup(keras.layers.Layer):
    """Looks up rows of a table."""

    def build(self, input_shape):
      self.table = self.add_weight(
        shape=(rows, width),
        initializer=keras.initializers.RandomUniform(seed=7),
        name='table',
      )

    def call(self, inputs):
      return tf.nn.embedding_lookup(self.table.value, inputs)

  strategy = tf.distribute.get_strategy()
  if options:
    strategy = tfs.ParameterServerStrategy(**options)
  with strategy.scope():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
      [
        keras.Input([4], dtype='int32'),
        Lookup(name='lookup'),
        keras.layers.Flatten(),
        keras.layers.Dense(1, name='dense'),
      ]
    )
    model.compile(optimizer, 'mse')
    model.optimizer.build(model.trainable_variables)
  return strategy, model


def expected_rows(name: str, rows: int, width: int) -> np.ndarray:
  """Returns rows that identify their position and their variable."""
  size = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
  return size + sum(map(ord, name)) % 97


def fill(model) -> None:
  """Writes a different value into every row of every table."""
  for variable in _large(model):
    name, shape = _short(variable), tuple(variable.shape)
    variable.assign(expected_rows(name, *shape))


def wrong_rows(model) -> dict[str, int]:
  """Returns how many rows of each table differ from those that `fill` wrote."""
  found = {}
  for variable in _large(model):
    name, shape = _short(variable), tuple(variable.shape)
    here = np.asarray(variable.numpy())
    found[name] = int((here != expected_rows(name, *shape)).any(1).sum())
  return found


def _large(model):
  return [
    v
    for v in [*model.variables, *model.optimizer.variables]
    if len(v.shape) == 2 and v.shape[0] > 1000
  ]


def _short(variable) -> str:
  return variable.path.split('/')[-1].split('_')[-1]


def save(rows: int, width: int, options: dict[str, Any]) -> str:
  """Saves tables of known rows and returns the path."""
  strategy, model = make(rows, width, **options)
  fill(model)
  strategy.track(model=model, optimizer=model.optimizer)
  path = strategy.save()
  strategy.close()
  return path


def load(
  rows: int, width: int, options: dict[str, Any]
) -> tuple[dict[str, int], int]:
  """Restores. Returns the wrong rows by table, and the number of parts."""
  strategy, model = make(rows, width, **options)
  strategy.restore(model=model, optimizer=model.optimizer)
  table = model.layers[0].table.value
  found = wrong_rows(model), len(getattr(table, 'parts', [table]))
  strategy.close()
  return found


def load_on_one_device(rows: int, width: int, directory: str) -> dict[str, int]:
  """Restores in one process without servers, and returns the wrong rows by table."""

  _, model = make(rows, width)
  tfs.Run(directory, model).restore()
  return wrong_rows(model)


def grow(
  rows: int, width: int, progress: str, options: dict[str, Any]
) -> dict[str, int]:
  """Returns the growth of this process while tables are made, saved and restored.

  Writes 1 before the tables are made, then counts phases. A test measures the
  servers meanwhile.
  """

  options = dict(options)
  if options.pop('blind', False):
    table_files.TableFiles._asked = lambda *unused: frozenset()
  # The first operation on each server allocates memory that does not belong to
  # tables.
  strategy, model = make(1000, width, **options)
  fill(model)
  strategy.track(model=model, optimizer=model.optimizer)
  strategy.save()
  strategy.close()
  del strategy, model
  found = {}
  options = {**options, 'checkpoint_dir': options['checkpoint_dir'] + '-2'}
  tell(progress, 1)
  with Peak() as peak:
    strategy, model = make(rows, width, **options)
  found['make'] = peak.growth
  for phase, name, save in (
    (2, 'save', lambda: strategy.track(model=model, optimizer=model.optimizer)),
    (3, 'save again', strategy.save),
  ):
    tell(progress, phase)
    began = time.monotonic()
    with Peak() as peak:
      save()
    found[name] = peak.growth
    found[f'seconds of {name}'] = time.monotonic() - began
  tell(progress, 4)
  table = model.layers[0].table.value
  sample = tf.range(0, rows, max(1, rows // 1000))
  before = tf.gather(table, sample).numpy()
  for part in table.parts:
    part.assign_add(tf.ones(part.shape))
  tell(progress, 5)
  began = time.monotonic()
  with Peak() as peak:
    strategy.restore(model=model, optimizer=model.optimizer)
  found['restore'] = peak.growth
  found['seconds of restore'] = time.monotonic() - began
  after = tf.gather(table, sample).numpy()
  found['wrong rows'] = int((before != after).any(1).sum())
  found['distinct rows'] = len(np.unique(before[:, 0]))
  found['parts'] = len(table.parts)
  tell(progress, 6)
  strategy.close()
  return found


def interrupted(
  progress: str, directory: str, when: str
) -> dict[str, list[float]]:
  """Adds 1 to all rows after a checkpoint. Servers then die in a save or a restore.

  Writes 1 when servers may be killed, and 2 when they may be killed in the
  middle of a restore. Continues when a file of that name exists.

  Returns:
    The values that were added to the rows of each part, in this process and in the
    newest checkpoint, which is read without servers.
  """
  rows, width = 40_000, 64
  strategy, model = make(
    rows,
    width,
    'sgd',
    checkpoint_dir=directory,
    variable_partitioner=lambda shape, dtype: (
      [2] + [1] * (len(shape) - 1) if shape[0] == rows else [1] * len(shape)
    ),
  )
  fill(model)
  strategy.track(model=model, optimizer=model.optimizer)
  table = model.layers[0].table.value
  table.assign_add(tf.ones(table.shape))

  def wait_in(phase):
    tell(progress, phase)
    programs.wait_until(lambda: os.path.exists(f'{progress}.{phase}'))

  def interrupt(name, phase):
    real = getattr(pieces, name)
    calls = []

    def call(*args):
      if args[2] == rows // 2 and not calls:  # The first rows of server 1.
        calls.append(args)
        wait_in(phase)
      return real(*args)

    setattr(pieces, name, call)

  if when == 'save':
    interrupt('write', 1)
  else:
    interrupt('rows_of', 2)
    wait_in(1)
  strategy.save()
  base = expected_rows('table', rows, width)
  saved = checkpointer.Checkpointer(directory).newest()
  arrays = [table.numpy(), saved.arrays['model/sequential/lookup/table']]
  found = {}
  for name, array in zip(('here', 'saved'), arrays, strict=True):
    added = array - base
    found[name] = []
    for part in added[: rows // 2], added[rows // 2 :]:
      values = np.unique(part)
      found[name].append(float(values[0]) if values.size == 1 else float('nan'))
  found['servers'] = [part.server for part in table.parts]
  found['recovered'] = [r['server'] for r in strategy.report()['recoveries']]
  strategy.close()
  return found
