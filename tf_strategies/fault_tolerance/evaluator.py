"""`SidecarEvaluator`: evaluates checkpoints while another process trains."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import errors, option_checks
from tf_strategies.checkpoint import checkpointer, model_state


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Loss and metrics by name, of a checkpoint after `iterations` steps."""

  path: str
  iterations: int
  results: Mapping[str, float]


@option_checks.has_options
class SidecarEvaluator:
  """Evaluates every new checkpoint of a directory, in the order of writing.

  Run it in the evaluator task: training does not wait. It reads checkpoints of
  `tfs.Run` and `ParameterServerStrategy`. A checkpoint that is already deleted or
  damaged is skipped with a warning.

  Args:
    model: built and compiled as the model that is trained, with an optimizer of
      the same class, on one device.
    data: as for `model.evaluate`; read again for each checkpoint.
    checkpoint_dir: directory of the checkpoints; may not exist yet.
    callbacks: as for `model.evaluate`. `keras.callbacks.TensorBoard(log_dir)` writes
      curves over the steps of the optimizer.
    steps: number of batches of an evaluation; None for all.
    poll_seconds: how often to look for a checkpoint.
    max_evaluations: number of checkpoints to evaluate; None for all.
    idle_timeout_seconds: how long to wait for another checkpoint; None until
      training is over.

  Raises:
    UnsupportedOptionError: the model is not built or not compiled, the data is
      infinite and `steps` is None, or a number is out of range.

  Example:

    >>> import tempfile
    >>> import tf_strategies as tfs
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile('sgd', 'mse')
    >>> data = tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.zeros([4, 1])))
    >>> path = tfs.Run(tempfile.mkdtemp(), model).save(epoch=1)
    >>> evaluator = SidecarEvaluator(
    ...   model, data, os.path.dirname(path), max_evaluations=1)
    >>> [evaluation.iterations for evaluation in evaluator.run()]
    [0]
  """

  def __init__(
    self,
    model: keras.Model,
    data: Any,
    checkpoint_dir: str | os.PathLike[str],
    callbacks: Sequence[keras.callbacks.Callback] = (),
    steps: int | None = None,
    poll_seconds: float = 1.0,
    max_evaluations: int | None = None,
    idle_timeout_seconds: float | None = None,
  ):
    option_checks.check_type(
      'model', model, keras.Model, 'a keras.Model', 'pass the model to evaluate'
    )
    option_checks.check(
      model.compiled,
      f'model={model.name!r}, which is not compiled',
      'a compiled model',
      'call model.compile with the loss and metrics to evaluate',
    )
    model_state.check_built(model)
    for name, count in (
      ('steps', steps),
      ('max_evaluations', max_evaluations),
    ):
      if count is not None:
        option_checks.check_int(name, count, 1)
    option_checks.check_seconds('poll_seconds', poll_seconds)
    if idle_timeout_seconds is not None:
      option_checks.check_seconds('idle_timeout_seconds', idle_timeout_seconds)
    _check_data(data, steps)
    option_checks.check_local_path(
      'checkpoint_dir', checkpoint_dir, 'pass the directory that is written'
    )
    option_checks.check(
      isinstance(callbacks, list | tuple)
      and all(isinstance(c, keras.callbacks.Callback) for c in callbacks),
      f'callbacks={callbacks!r}',
      'a list of Keras callbacks',
      'write callbacks=[keras.callbacks.TensorBoard(log_dir)]',
    )
    self._model = model
    self._data = data
    named = model_state.name_objects(
      {'model': model, 'optimizer': model.optimizer}
    )
    # Weights and the step.
    self._variables = {name: v for name, v in named.items() if _is_needed(name)}
    self._checkpointer = checkpointer.Checkpointer(checkpoint_dir)
    self._callbacks = list(callbacks)
    self._steps = steps
    self._poll_seconds = poll_seconds
    self._max_evaluations = max_evaluations
    self._idle_timeout_seconds = (
      math.inf if idle_timeout_seconds is None else idle_timeout_seconds
    )
    self._seen: set[tuple[str, float]] = set()

  def run(self) -> list[Evaluation]:
    """Evaluates checkpoints until there is nothing more to wait for.

    Ends after `max_evaluations`, after `idle_timeout_seconds` without a new
    checkpoint, or when training is over and no checkpoint is left.

    Returns:
      The evaluations of this call, in order. A second call continues with
      newer checkpoints.

    Raises:
      CheckpointMismatchError: a checkpoint belongs to another model, or was
        written without the optimizer.
      UnsupportedOptionError: the directory has checkpoints of TensorFlow alone.
    """
    done: list[Evaluation] = []
    ends_at = time.monotonic() + self._idle_timeout_seconds
    while True:
      # Looked up before the list, so that the list has every checkpoint.
      is_finished = self._checkpointer.is_finished
      path = self._next()
      if path is not None:
        done += self._evaluate(path)
        if len(done) == self._max_evaluations:
          return done
        ends_at = time.monotonic() + self._idle_timeout_seconds
        continue
      self._check_format()
      left = ends_at - time.monotonic()
      if is_finished or left <= 0:
        why = 'training is over' if is_finished else 'there is no new one'
        directory = self._checkpointer.directory
        logging.info(
          'Evaluated %d checkpoints of %s: %s.', len(done), directory, why
        )
        return done
      time.sleep(min(self._poll_seconds, left))

  def _check_format(self) -> None:
    """Raises an error where only TensorFlow saves: nothing could be evaluated."""
    directory = self._checkpointer.directory
    option_checks.check(
      self._seen or not os.path.exists(os.path.join(directory, 'checkpoint')),
      f'checkpoint_dir={directory!r} with those of tf.train.Checkpoint',
      'checkpoints of tfs.Run or of ParameterServerStrategy',
      'save by the callback tfs.Run(directory, model)',
    )

  def _next(self) -> str | None:
    """Returns the oldest checkpoint that was not seen yet."""
    for path in self._checkpointer.paths():
      with contextlib.suppress(FileNotFoundError):
        # If training restarted and wrote a checkpoint again, its time differs.
        found = path, os.stat(path).st_mtime
        if found not in self._seen:
          self._seen.add(found)
          return path
    return None

  def _evaluate(self, path: str) -> list[Evaluation]:
    """Evaluates a checkpoint; returns none if it cannot be read."""
    try:
      self._restore(path)
    except (OSError, errors.DataError) as e:
      is_missing = isinstance(e, FileNotFoundError)
      why = 'was deleted' if is_missing else 'cannot be read'
      logging.warning('Skipped %s, which %s: %s', path, why, e)
      return []
    results = self._model.evaluate(
      self._data,
      steps=self._steps,
      callbacks=self._callbacks,
      return_dict=True,
      verbose=0,
    )
    results = {name: float(value) for name, value in results.items()}
    step = int(self._model.optimizer.iterations.numpy())
    shown = ', '.join(f'{k} {v:.6g}' for k, v in results.items())
    logging.info('Evaluated %s, step %d: %s', path, step, shown)
    return [Evaluation(path, step, results)]

  def _restore(self, path: str) -> None:
    """Gives the model what a checkpoint has, or raises an error if it is another's."""
    found = self._checkpointer.open(path)
    saved = {k: found.arrays[k] for k in found.arrays if _is_needed(k)}
    for name, reduction in found.metadata.get('parts', {}).items():
      if name in saved:
        saved[name] = model_state.reduce_parts(saved[name], reduction)
    arrays = model_state.matched(found, self._variables, saved)
    for name, variable in self._variables.items():
      variable.assign(arrays[name])


def _is_needed(name: str) -> bool:
  """Returns whether a name is of a weight, or of the count of steps."""
  kind, _, inside = name.partition('/')
  if kind == 'optimizer':
    return inside.endswith('/iteration')
  return kind == 'model' and not inside.startswith('random/')


def _check_data(data: Any, steps: int | None) -> None:
  is_one_time = isinstance(data, Iterator | str | bytes | Number)
  option_checks.check(
    not is_one_time and (hasattr(data, '__iter__') or hasattr(data, '__len__')),
    f'data={data!r}',
    'data that model.evaluate can read several times',
    'pass a tf.data.Dataset, or arrays',
  )
  if steps is None and isinstance(data, tf.data.Dataset):
    option_checks.check(
      data.cardinality() != tf.data.INFINITE_CARDINALITY,
      'steps=None with infinite data',
      'a number of batches',
      'pass steps=100, or data without repeat()',
    )
