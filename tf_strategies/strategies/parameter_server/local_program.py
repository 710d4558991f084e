"""What a worker that trains by itself does: functions that take and return values.

A unit is some batches. The worker fetches what servers have, once; trains on copies;
and sends once how far it has come. Its own state it is given and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, errors
from tf_strategies.keras import gradient_reducer
from tf_strategies.strategies.parameter_server import (
  batch_message,
  copied_variables,
  microbatch,
  packing,
  partitioned,
  step_access,
  step_task,
  traced_step,
  worker_function,
)
from tf_strategies.strategies.parameter_server import journal as journal_lib

# What functions are told: of which place, how many rows; the number of the task, the
# token of its worker.
_HEADER = tf.TensorSpec([4], tf.int64)


def header(place: int = 0, rows: int = 0, task: int = 0, token: int = 0):
  """The first argument of each function of a program."""
  return np.array([place, rows, task, token], np.int64)


def _ids(of: Sequence[Any]) -> set[int]:
  return {
    id(part) for variable in of for part in partitioned.parts_of(variable)
  }


class Program:
  """A step of which workers do several by themselves.

  Args:
    step: of training, with a `LocalSteps`.
    structure: of a batch.
    reducer: has `LocalSteps` apply gradients as they are.
    in_replica: makes a function run in the strategy's replica context.
  """

  def __init__(
    self,
    step: step_task.Step,
    structure: Any,
    reducer: gradient_reducer.GradientReducer,
    in_replica: Callable[[Callable], Callable],
  ):
    self.step, self._reducer = step, reducer
    self._in_replica = in_replica
    self._optimizer = step.local
    look = copied_variables.Copies()
    with reducer.gradients_reduced():
      self.discovery = worker_function.discover(step.run, structure, look=look)
    self._check_results()
    self._weights = _keras_internal.trainable_variables(step.local)
    _check_have_values(self._weights)
    weights = _ids(self._weights)
    own = _ids([*step.local.inner_state(), *_loss_scale(step)])
    counters = _ids(step.counters() if step.counters else ())
    # Which servers have, and which begin as zeros: their sums travel.
    self.fetched, self.own, self.counted = [], [], []
    for variable in look.variables:
      is_assigned = id(variable) in look.assigned
      if id(variable) in own:
        self.own.append(variable)
      elif id(variable) in counters and id(variable) in look.added | (
        look.assigned
      ):
        _check_is_sum(variable, is_assigned)
        self.counted.append(variable)
      else:
        self.fetched.append(variable)
    # Of them, those to send beside the differences of weights; which are added to.
    self._sent = [
      v
      for v in self.fetched
      if id(v) not in weights and id(v) in look.added | look.assigned
    ]
    self._summed = look.added - look.assigned
    # Of their own, but one value in checkpoints: servers get the mean.
    self._averaged = [v for v in self.own if v.states is None]
    self.variables = [*self.fetched, *self.own, *self.counted]
    self._fetch = worker_function.concrete(self._trace_fetch, _HEADER)
    self._fetch_own = worker_function.concrete(
      lambda unused: list(map(_here, packing.fetch(self.own))), _HEADER
    )

  def _check_results(self) -> None:
    if not self.discovery.are_numbers:
      raise errors.UnsupportedOptionError(
        f'a step under LocalSteps that returns {self.discovery.outputs}',
        'numbers, and arrays of a fixed shape',
        'return fewer values',
      )

  def fetch(self, worker: int, place: int) -> list[tf.Tensor]:
    """What servers have, on a worker."""
    return worker_function.run_on_worker(self._fetch, worker, header(place))

  def fetch_own(self, worker: int) -> list[tf.Tensor]:
    """What servers have of the worker's own state, which is how it begins."""
    return worker_function.run_on_worker(self._fetch_own, worker, header())

  def zeros(self) -> list[tf.Tensor]:
    """What is counted in a unit, before it."""
    with tf.device(worker_function.COORDINATOR):
      return [tf.zeros(v.shape, v.dtype) for v in self.counted]

  def steps_function(self, layout: batch_message.Layout) -> Callable:
    """Trains on the batches of a message: from the values of variables to others."""
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
    return worker_function.concrete(
      lambda message, *values: self._trace_steps(layout, message, values),
      layout.argument,
      *specs,
    )

  def read_function(self, layout: batch_message.Layout) -> Callable:
    """As `steps_function`, of one batch that it reads; adds up rows too."""
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]

    def trace(argument, rows, *values):
      batch = layout.read(argument, tf.constant(0, tf.int64)).batch
      copies = copied_variables.Copies(self.variables, values)
      with copies.tracing(), self._reducer.gradients_reduced():
        numbers = self.discovery.report(self.step.run(batch))
      rows += batch_message.rows_of(batch)
      return [rows, numbers, *copies.take_values()]

    rows = tf.TensorSpec([], tf.int64)
    return worker_function.concrete(trace, layout.argument, rows, *specs)

  def run_steps(self, function, worker, message, values):
    """Calls a `steps_function`: the values afterwards, and what the last one said."""
    *values, numbers = worker_function.run_on_worker(
      function, worker, message, *values
    )
    return values, numbers

  def slots_function(self) -> microbatch.SlotFunction:
    """Leaves in slots what `microbatch.ApplyFunction` makes a meeting of."""
    return microbatch.SlotFunction(self._contents, *self._end_specs())

  def end_function(self, journal: journal_lib.Journal) -> Callable:
    """Sends how far a worker has come: applied at once, and once."""
    discovery = worker_function.discover(self._finish, self._end_specs())

    def end(header_, *tensors):
      traced = traced_step.TracedStep(discovery.access)
      with traced.tracing():
        _, _, task, token = tf.unstack(header_)
        one = tf.constant(1, tf.int64)
        traced.ticket = journal.ticket(batch_message.TASKS, token, task, one)
        reported = discovery.report(self._finish([header_, *tensors]))
      traced.commit()
      return reported

    return worker_function.concrete(end, *self._end_specs())

  def end_tensors(self, before, after, numbers) -> list[tf.Tensor]:
    """What the last function takes, beside the header."""
    return [*before[: len(self.fetched)], *after, numbers]

  def _end_specs(self):
    both = [*self.fetched, *self.variables]
    return [
      _HEADER,
      *(tf.TensorSpec(v.shape, v.dtype) for v in both),
      tf.TensorSpec([sum(self.discovery.sizes)], tf.float64),
    ]

  # What is traced.

  def _trace_fetch(self, header_):
    values = packing.fetch(self.fetched)
    return [
      value + _offset(variable, header_) if _is_seed(variable) else _here(value)
      for variable, value in zip(self.fetched, values, strict=True)
    ]

  def _trace_steps(self, layout, message, values):
    copies = copied_variables.Copies(self.variables, values)
    discovery, first = self.discovery, tf.constant(0, tf.int64)

    def one_step(step):
      return discovery.report(self.step.run(layout.decode_batch(message, step)))

    with copies.tracing(), self._reducer.gradients_reduced():
      if layout.steps == 1:
        numbers = one_step(first)
      else:
        numbers = worker_function.one_by_one(
          one_step, first, layout.steps, sum(discovery.sizes)
        )
    return [*copies.take_values(), numbers]

  def _outcome(self, header_, tensors):
    """Differences of weights, writes of others, and what the last step said."""
    *tensors, numbers = tensors
    count = len(self.fetched)
    before = dict(zip(map(id, self.fetched), tensors[:count], strict=True))
    after = dict(zip(map(id, self.variables), tensors[count:], strict=True))

    def difference(weight):
      parts = partitioned.parts_of(weight)
      if not all(id(p) in before for p in parts):
        return None  # The step does not use it.
      found = [before[id(p)] - after[id(p)] for p in parts]
      return found[0] if len(found) == 1 else tf.concat(found, 0)

    writes = [
      step_access.Write(v, after[id(v)], after[id(v)]) for v in self.counted
    ]
    for variable in [*self._sent, *self._averaged]:
      value, delta = after[id(variable)], None
      if id(variable) in self._summed and id(variable) in before:
        delta = value - before[id(variable)]
      if _is_seed(variable):
        value -= _offset(variable, header_)
      writes.append(step_access.Write(variable, value, delta))
    return [difference(w) for w in self._weights], writes, numbers

  def _contents(self, header_, *tensors) -> microbatch.Contents:
    differences, writes, numbers = self._outcome(header_, tensors)
    for write in writes:
      if _is_seed(write.variable):
        write.delta = None  # All have drawn equally often: that of the first.
    return microbatch.Contents(
      [(self._optimizer.outer, differences, self._weights)],
      writes,
      numbers,
      tf.cast(header_[1], tf.float32),
      header_,
    )

  def _finish(self, arguments):
    """A step of its own: updates weights by one worker's differences."""
    header_, *tensors = arguments
    differences, writes, numbers = self._outcome(header_, tensors)
    self._in_replica(
      lambda _: self._optimizer.outer.apply(differences, self._weights)
    )(None)
    for write in writes:
      variable = write.variable
      if write.delta is not None:
        variable.assign_add(write.delta)
      else:
        variable.assign(write.value)
    if self.step.results is None:
      return numbers
    return self.step.results()


def _loss_scale(step) -> list[Any]:
  """What a loss scale around the `LocalSteps` writes: workers skip steps apart."""
  found = []
  for each in _keras_internal.chain(step.optimizers[0]):
    if each is step.local:
      break
    inner = {id(v) for v in each.inner_optimizer.variables}
    inner.add(id(_keras_internal.learning_rate_variable(each)))
    found += [v for v in each.variables if id(v) not in inner]
  return found


def _here(value: tf.Tensor) -> tf.Tensor:
  """A tensor that a function returns on the worker, wherever it was read.

  TensorFlow looks through an identity, and returns what is behind it there: it would
  travel back, and again to each function that takes it.
  """
  return tf.raw_ops.DeepCopy(x=value)


def _is_seed(variable) -> bool:
  return _keras_internal.is_seed_state(variable.name, variable.dtype)


def _offset(variable, header_) -> tf.Tensor:
  """What a place adds to a seed, so that places draw other numbers."""
  number = header_[0] * _keras_internal.SEED_STRIDE
  return tf.cast(tf.stack([number, tf.zeros_like(number)]), variable.dtype)


def _check_have_values(weights) -> None:
  for variable in weights:
    if _keras_internal.table_of(variable) is not None:
      raise errors.UnsupportedOptionError(
        f'dynamic table {variable.path!r} under LocalSteps',
        'weights that a worker can hold and train by itself',
        'use keras.layers.Embedding, or train without LocalSteps',
      )


def _check_is_sum(variable, is_assigned: bool) -> None:
  if is_assigned:
    raise errors.UnsupportedOptionError(
      f'metric variable {variable.name!r} that is no sum, under LocalSteps',
      'metrics that only add to their variables, as workers count apart',
      'compute that metric in model.evaluate',
    )
