"""`SidecarEvaluator`: evaluates checkpoints beside the job that writes them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import errors

# Whoever trains writes a file of this name beside the checkpoints, after the
# last one. What is in it does not matter.
FINISHED_FILE = 'finished'

# What TensorFlow raises for a checkpoint of which a part is missing: IndexError
# where a file is too short, an OpError otherwise.
_UNREADABLE = (tf.errors.OpError, IndexError)


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What the evaluation of one checkpoint came to.

  Attributes:
    path: of the checkpoint.
    iterations: of the optimizer, when it was written.
    results: loss and metrics by name.
  """

  path: str
  iterations: int
  results: Mapping[str, float]


class SidecarEvaluator:
  """Evaluates every new checkpoint of a directory, in the order of writing.

  For the evaluator of a job: training need not wait for evaluation. It writes
  checkpoints with `tf.train.CheckpointManager`, as in the example; one that is
  deleted or damaged before its turn is skipped.

  Args:
    model: built and compiled as the model that is trained, with an optimizer of
      the same class, on one device.
    data: what `model.evaluate` takes, read anew for each checkpoint.
    checkpoint_dir: where checkpoints are, or will be.
    log_dir: where to write `evaluation_<metric>` for TensorBoard, at the step
      that the optimizer had come to; None writes nothing.
    steps: batches of an evaluation; None for all.
    poll_seconds: how often to look for a checkpoint.
    max_evaluations: how many to evaluate; None for all that come.
    idle_timeout_seconds: how long to wait for another checkpoint. None waits
      until training is over, or until a signal ends the process.

  Raises:
    UnsupportedOptionError: the model is not built or not compiled, the data is
      infinite and `steps` is None, a number is out of range, or `log_dir` is
      given without TensorBoard.

  Example:

    >>> import os, tempfile
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile('sgd', 'mse')
    >>> data = tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.zeros([4, 1])))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   manager = tf.train.CheckpointManager(
    ...     tf.train.Checkpoint(model=model, optimizer=model.optimizer),
    ...     directory, max_to_keep=3)
    ...   _ = manager.save()
    ...   open(os.path.join(directory, FINISHED_FILE), 'w').close()
    ...   evaluations = SidecarEvaluator(model, data, directory).run()
    >>> [evaluation.iterations for evaluation in evaluations]
    [0]
  """

  def __init__(
    self,
    model: keras.Model,
    data: Any,
    checkpoint_dir: str | os.PathLike[str],
    log_dir: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    poll_seconds: float = 1.0,
    max_evaluations: int | None = None,
    idle_timeout_seconds: float | None = None,
  ):
    _check_model(model)
    _check_count('steps', steps)
    _check_count('max_evaluations', max_evaluations)
    _check_seconds('poll_seconds', poll_seconds)
    if idle_timeout_seconds is not None:
      _check_seconds('idle_timeout_seconds', idle_timeout_seconds)
    _check_data(data, steps)
    _check_log_dir(log_dir)
    self._model = model
    self._data = data
    self._directory = os.fspath(checkpoint_dir)
    self._log_dir = None if log_dir is None else os.fspath(log_dir)
    self._steps = steps
    self._poll_seconds = poll_seconds
    self._max_evaluations = max_evaluations
    self._idle_timeout_seconds = idle_timeout_seconds
    self._checkpoint = tf.train.Checkpoint(
      model=model, optimizer=model.optimizer
    )
    self._seen: set[tuple[str, float | None]] = set()
    self._is_compatible = False
    self._writer = None

  def run(self) -> list[Evaluation]:
    """Evaluates checkpoints until there is nothing more to wait for.

    That is after `max_evaluations`, after `idle_timeout_seconds` without a new
    checkpoint, or when there is a file `FINISHED_FILE` and no checkpoint is
    left. Whoever trains on in the same directory removes that file first.

    Returns:
      What was evaluated by this call, in order. A second call goes on with
      checkpoints that are new since.

    Raises:
      CheckpointMismatchError: a checkpoint is of another model, or was written
        without the optimizer.
    """
    done: list[Evaluation] = []
    waits_since = time.monotonic()
    while True:
      # Before the list is read: what is written first is then in the list.
      is_finished = tf.io.gfile.exists(
        os.path.join(self._directory, FINISHED_FILE)
      )
      path = self._next()
      if path is not None:
        evaluation = self._evaluate(path)
        if evaluation is not None:
          done.append(evaluation)
        if len(done) == self._max_evaluations:
          return done
        waits_since = time.monotonic()
        continue
      left = math.inf
      if self._idle_timeout_seconds is not None:
        left = waits_since + self._idle_timeout_seconds - time.monotonic()
      if is_finished or left <= 0:
        logging.info(
          'Evaluated %d checkpoints of %s: %s.',
          len(done),
          self._directory,
          'training is over' if is_finished else 'no new one has come',
        )
        return done
      time.sleep(min(self._poll_seconds, left))

  def _next(self) -> str | None:
    """The oldest checkpoint that was not yet looked at."""
    state = tf.train.get_checkpoint_state(self._directory)
    if state is None:
      return None
    # The time tells a checkpoint from an older one of the same name, where
    # training went back and wrote it again. A single `Checkpoint.save` has none.
    for found in itertools.zip_longest(
      state.all_model_checkpoint_paths,
      state.all_model_checkpoint_timestamps[
        : len(state.all_model_checkpoint_paths)
      ],
    ):
      if found not in self._seen:
        self._seen.add(found)
        return found[0]
    return None

  def _evaluate(self, path: str) -> Evaluation | None:
    try:
      self._restore(path)
    except _UNREADABLE as e:
      if isinstance(e, tf.errors.NotFoundError):
        logging.warning('Skipped %s, which was deleted: %s', path, e)
      else:
        logging.warning('Skipped %s, which cannot be read: %s', path, e)
      return None
    results = self._model.evaluate(
      self._data, steps=self._steps, return_dict=True, verbose=0
    )
    evaluation = Evaluation(
      path,
      int(self._model.optimizer.iterations.numpy()),
      {name: float(value) for name, value in results.items()},
    )
    logging.info(
      'Evaluated %s, step %d: %s',
      path,
      evaluation.iterations,
      ', '.join(f'{k} {v:.6g}' for k, v in evaluation.results.items()),
    )
    self._write(evaluation)
    return evaluation

  def _restore(self, path: str) -> None:
    try:
      self._checkpoint.restore(path).expect_partial()
      if not self._is_compatible:
        self._check_restores_everything(path)
        self._is_compatible = True
    except ValueError as e:
      raise errors.CheckpointMismatchError(
        f'{path} is not a checkpoint of this model: {e} Build the model with '
        'the code that builds it for training, or pass another checkpoint_dir.'
      ) from e

  def _check_restores_everything(self, path: str) -> None:
    """Restores once more, over other values: what keeps those is not in it.

    TensorFlow's own check also objects to variables of the optimizer, such as
    slots, which need not be here.
    """
    variables = [*self._model.weights, self._model.optimizer.iterations]
    fills = []
    for variable in variables:
      value = np.asarray(variable)
      fill = np.zeros_like if np.any(value) else np.ones_like
      fills.append(fill(value))
      variable.assign(fills[-1])
    self._checkpoint.restore(path).expect_partial()
    lacking = [
      variable.path
      for variable, fill in zip(variables, fills, strict=True)
      if fill.size and np.array_equal(np.asarray(variable), fill)
    ]
    if lacking:
      raise ValueError(f'it has no values for {", ".join(lacking)}.')

  def _write(self, evaluation: Evaluation) -> None:
    if self._log_dir is None:
      return
    if self._writer is None:
      self._writer = tf.summary.create_file_writer(self._log_dir)
    with self._writer.as_default(evaluation.iterations):
      for name, value in evaluation.results.items():
        tf.summary.scalar(f'evaluation_{name}', value)
    self._writer.flush()


def _check_model(model: keras.Model) -> None:
  if not model.compiled:
    raise errors.UnsupportedOptionError(
      f'model={model.name!r}, which is not compiled',
      'a compiled model',
      'call model.compile with the loss and metrics to evaluate',
    )
  if not model.built:
    raise errors.UnsupportedOptionError(
      f'model={model.name!r}, which has no variables yet',
      'a built model, into which a checkpoint can be read',
      'begin it with keras.Input(shape), or call model.build(shape)',
    )


def _check_data(data: Any, steps: int | None) -> None:
  if steps is not None or not isinstance(data, tf.data.Dataset):
    return
  if data.cardinality() == tf.data.INFINITE_CARDINALITY:
    raise errors.UnsupportedOptionError(
      'steps=None with infinite data',
      'the number of batches of an evaluation',
      'pass steps=100, or data without repeat()',
    )


def _check_log_dir(log_dir: str | os.PathLike[str] | None) -> None:
  # tf.summary writes with TensorBoard, which TensorFlow 2.21 does not bring.
  if log_dir is None or importlib.util.find_spec('tensorboard') is not None:
    return
  raise errors.UnsupportedOptionError(
    f'log_dir={os.fspath(log_dir)!r} without TensorBoard',
    'log_dir=None, or an environment that has TensorBoard',
    'run `pip install tensorboard`',
  )


def _check_count(name: str, value: int | None) -> None:
  is_count = isinstance(value, int) and not isinstance(value, bool)
  if value is not None and not (is_count and value > 0):
    raise errors.UnsupportedOptionError(
      f'{name}={value!r}', 'an integer of at least 1, or None', 'leave it out'
    )


def _check_seconds(name: str, value: float) -> None:
  if not 0 < value < math.inf:
    raise errors.UnsupportedOptionError(
      f'{name}={value!r}',
      'a finite number of seconds, more than 0',
      f'write {name}=1.0, or leave it out',
    )
