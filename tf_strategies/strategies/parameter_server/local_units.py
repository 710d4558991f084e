"""Workers that train by themselves for some batches; see `tfs.keras.LocalSteps`.

Batches are kept until there are `every` of them: that is a unit, which workers do
without asking anybody. With meetings (mode 'sync') each worker has its rows of every
batch, and the mean of all differences updates the servers' weights once all are
there. Elsewhere a worker has the batches of a unit whole, and its difference is
applied as soon as it comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import errors
from tf_strategies.keras import gradient_reducer
from tf_strategies.keras import local_steps as optimizers_lib
from tf_strategies.strategies.parameter_server import (
  batch_message,
  local_program,
  microbatch,
  partitioned,
  step_task,
  worker_function,
  worker_pool,
  worker_states,
)
from tf_strategies.strategies.parameter_server import options as options_lib


class LocalUnits(gradient_reducer.GradientReducer):
  """What an engine does with steps of which workers do several by themselves.

  It is also what a `LocalSteps` asks: servers' weights are its anchor.
  """

  takes_local_steps = True
  holds_anchor = True

  def __init__(
    self,
    engine,
    pool: worker_pool.WorkerPool,
    meets: bool,
    in_replica: Callable[[Callable], Callable],
  ):
    self.states = worker_states.WorkerStates(pool)
    self.settle: Callable[[], None] = lambda: None  # The strategy's.
    self.in_replica = in_replica
    self.engine, self.pool = engine, pool
    self._meets = meets
    self._step: step_task.Step | None = None
    # Batches of the next unit, while there are not enough of them; and what was
    # added to them last.
    self._waiting: list[batch_message.Batch] = []
    self._added: Sequence[batch_message.Batch] | None = None
    self.begun = 0  # Batches of units that were begun.
    self._meeting: Meeting | None = None
    # What steps have reported at their last meeting: float64 [count].
    self._reported = weakref.WeakKeyDictionary()

  @property
  def waiting(self) -> int:
    """How many batches wait for others."""
    return len(self._waiting)

  # What a `LocalSteps` asks.

  def note_built(self, optimizer) -> None:
    """See base class: the inner optimizer's state is each worker's own."""
    for variable in optimizer.inner_state():
      variable.value.is_of_worker = True
      for part in partitioned.parts_of(variable):
        part.states = self.states

  def apply_locally(self, optimizer, gradients, apply) -> None:
    """See base class: only workers' steps count."""
    del optimizer, gradients, apply
    raise errors.UnsupportedOptionError(
      'LocalSteps.apply under ParameterServerStrategy outside of the steps of its '
      'workers',
      'a model that fit trains, or a step of a loop that knows the optimizer',
      'write step = strategy.remote_step(fn, [optimizer]) and step(batch)',
    )

  # What the engine asks.

  def discover(self, step: step_task.Step, structure: Any):
    """What a step does with such batches."""
    return self._program(step, structure).discovery

  def train(
    self, step: step_task.Step, batches: Sequence[batch_message.Batch]
  ) -> Any:
    """Takes batches, and begins units; returns what was reported last."""
    if step is not self._step:
      self.end()
      self._step = step
    structure = batches[0].layout(1).traced_structure
    program = self._program(step, structure)
    if (
      batches is not self._added
    ):  # A call is repeated if a server was lost in it.
      self._waiting += batches
      self._added = batches
    while len(self._waiting) >= step.local.every:
      self._begin(program, step.local.every)
    discovery = program.discovery
    count = sum(discovery.sizes)
    self._reported.setdefault(step, np.zeros([count]))
    places = discovery.unflatten(np.arange(count))
    return tf.nest.map_structure(
      lambda place: step_task.LatestNumber(self, step, place), places
    )

  def numbers(self, step: step_task.Step) -> np.ndarray:
    """What was reported last; zeros, as of metrics of no rows, before anything."""
    newest = None if self._meets else self.engine.reports.numbers(step)
    return self._reported[step] if newest is None else newest

  def end(self) -> None:
    """Trains on what waits, which is a shorter unit."""
    if self._waiting:
      structure = self._waiting[0].layout(1).traced_structure
      program = self._program(self._step, structure)
      self._begin(program, len(self._waiting))
    self.finish()

  def finish(self) -> None:
    """Waits for the units that were begun; their meeting is held."""
    if self._meeting is not None and not self._meeting.was_dropped:
      # It is kept if that fails, which may be of a moment; then it is held again.
      self._reported[self._step] = self._meeting.hold()
    self._meeting = None

  def forget(self) -> None:
    """Servers were restored: what was on its way is lost."""
    self._meeting = None

  def _program(self, step, structure) -> local_program.Program:
    return self.engine.cached(
      (step, 'local'),
      lambda: local_program.Program(step, structure, self, self.in_replica),
    )

  def _begin(self, program, count) -> None:
    batches = self._waiting[:count]
    if self._meets:
      self.finish()
      meeting = Meeting(self, program, batches)
      meeting.begin()
      self._meeting = meeting
    else:
      self.pool.submit(Unit(self, program, batches))
    del self._waiting[:count]
    self.begun += count


class _Unit(worker_pool.Task):
  """Batches on which one worker trains by itself."""

  def __init__(
    self,
    units: LocalUnits,
    program: local_program.Program,
    batches: Sequence[batch_message.Batch],
  ):
    self._units, self._program = units, program
    self._engine = units.engine
    self._batches = batches
    # In the caller's thread, which has the user's scopes.
    self._runs = [
      (run[0].layout(len(run)), [b.arrays for b in run])
      for run in batch_message.alike(batches)
    ]
    self._functions = [
      self._cached(layout.key, lambda x=layout: program.steps_function(x))
      for layout, _ in self._runs
    ]

  def _cached(self, key, make):
    return self._engine.cached((self._program.step, 'local', key), make)

  def _train(self, worker: int, place: int) -> list[tf.Tensor]:
    """Trains; returns what the function that ends a unit takes."""
    program, states = self._program, self._units.states
    self._life = states.life_of(worker)
    before = program.fetch(worker, place)
    own = states.take(place, worker, program.own)
    if any(value is None for value in own):
      fetched = program.fetch_own(worker)
      own = [f if v is None else v for v, f in zip(own, fetched, strict=True)]
    values = [*before, *own, *program.zeros()]
    for (layout, arrays), function in zip(
      self._runs, self._functions, strict=True
    ):
      message = layout.encode(0, 0, arrays)
      values, numbers = program.run_steps(function, worker, message, values)
    first = len(program.fetched)
    self._own = values[first : first + len(program.own)]
    return program.end_tensors(before, values, numbers)

  def keep(self, place: int, worker: int) -> None:
    """From now on the state after this unit is that of the place."""
    self._units.states.keep(
      place, worker, self._life, self._program.own, self._own
    )

  def survive(self, worker: int) -> bool:
    """The splits of other steps go to others; this is done again, from its start."""
    self._engine.lose_splits(worker)
    return False


class Unit(_Unit):
  """A unit whose difference is applied as soon as it is there."""

  def __init__(self, units, program, batches):
    super().__init__(units, program, batches)
    self.step, self.discovery = program.step, program.discovery
    self.steps = len(batches)
    self.reported = None
    self._number = self._engine.new_number()
    self._end = self._cached(
      'end', lambda: program.end_function(self._engine.journal)
    )

  def may_begin(self, worker: int) -> bool:
    """See base class."""
    return self._engine.may_begin(worker)

  def give_up(self, worker: int) -> None:
    """From now on what the worker still does has no effect."""
    self._engine.journal.revoke([worker])

  def run(self, worker: int) -> None:
    """See base class."""
    self._engine.started(self.step, worker)
    token = self._engine.journal.token(worker)
    tensors = self._train(worker, worker)
    header = local_program.header(task=self._number, token=token)
    self.reported = worker_function.run_on_worker(
      self._end, worker, header, *tensors
    )

  def survive(self, worker: int) -> bool:
    """Whether the difference was applied before the worker was lost."""
    super().survive(worker)
    done = self._engine.journal.done(batch_message.TASKS, self._number)
    self._own = None
    if done:
      logging.warning(
        'worker %d failed when its difference had been applied: the state of its '
        'inner optimizer is that before this unit',
        worker,
      )
    return done > 0

  def finish(self, worker: int) -> None:
    """See base class."""
    if self._own is not None:
      self.keep(worker, worker)
    self._batches = self._runs = ()
    self._engine.finished(self, worker)


class Share(_Unit):
  """The rows of a unit that one place has."""

  def __init__(self, units, program, batches, place: int):
    super().__init__(units, program, batches)
    self.place = place
    self.is_done = False
    self.function = self._cached('slots', program.slots_function)
    self.slots: microbatch.Slots | None = None
    self.worker = -1

  def has_work_for(self, worker: int) -> bool:
    """Its own worker, which has the state; another one if that is away."""
    return worker == self.place or self.place in self._units.pool.lost

  def run(self, worker: int) -> None:
    """See base class."""
    # New ones each time: a worker that was lost may still write the old ones.
    self.slots = self._engine.take_slots(self.function.layout)
    self._engine.staleness.start(worker)
    tensors = self._train(worker, self.place)
    rows = sum(batch.layout(1).rows for batch in self._batches)
    header = local_program.header(self.place, rows)
    self.function(worker, header, self.slots, *tensors)
    self.worker = worker

  def finish(self, worker: int) -> None:
    """See base class."""
    self._engine.staleness.end(worker, 0)
    self.is_done = True

  def commit(self) -> None:
    """The meeting was held: nothing of this is done again."""
    self.keep(self.place, self.worker)
    self._engine.release(self)


class Meeting:
  """The shares of a unit, whose mean difference updates the servers' weights."""

  def __init__(
    self,
    units: LocalUnits,
    program: local_program.Program,
    batches: Sequence[batch_message.Batch],
  ):
    self._units, self._program = units, program
    self._steps = len(batches)
    places = len(units.pool.workers)
    # A batch of few rows has none for the last places, which leave it out.
    of_places = [[] for _ in range(places)]
    for batch in batches:
      for place, part in enumerate(batch.microbatches(places)):
        of_places[place].append(part)
    self._shares = [
      Share(units, program, parts, place)
      for place, parts in enumerate(of_places)
      if parts
    ]

  @property
  def was_dropped(self) -> bool:
    """Whether some of it will not be done: an error was raised."""
    attempt = self._units.pool.attempt
    return any(not s.is_done and s.attempt != attempt for s in self._shares)

  def begin(self) -> None:
    """Gives the shares to workers."""
    engine = self._units.engine
    if self._units.pool.is_busy(lambda task: not isinstance(task, Share)):
      # Evaluation must be done before variables change.
      engine.drain()
    for share in self._shares:
      self._units.pool.submit(share)

  def hold(self) -> np.ndarray:
    """Waits for all shares and applies them; returns what is reported."""
    engine, shares = self._units.engine, self._shares
    engine.wait(lambda: all(share.is_done for share in shares))
    apply = engine.cached(
      (self._program.step, 'local', 'apply', len(shares)),
      lambda: microbatch.ApplyFunction(
        self._program.step,
        shares[0].function.layout,
        len(shares),
        self._program.discovery,
        self._units.in_replica,
      ),
    )
    numbers = apply([share.slots for share in shares]).numpy()
    for share in shares:
      share.commit()
    engine.count(self._steps)
    return numbers


def local_of(
  optimizers: Sequence[Any], options: options_lib.ParameterServerOptions
) -> optimizers_lib.LocalSteps | None:
  """The `LocalSteps` among the optimizers of a step.

  Raises:
    UnsupportedOptionError: it is not alone, or is one with backup workers.
  """
  found = [optimizers_lib.in_chain(o) for o in optimizers]
  if not any(found):
    return None
  if len(found) > 1:
    kinds = [type(o).__name__ for o in optimizers]
    raise errors.UnsupportedOptionError(
      f'a step with the optimizers {kinds} under ParameterServerStrategy',
      'one optimizer a step, if it is a LocalSteps',
      "train without LocalSteps, or use 'multi_worker_ring'",
    )
  if options.backup_workers:
    raise errors.UnsupportedOptionError(
      f'LocalSteps with backup_workers={options.backup_workers}',
      'meetings of all workers: a late one has trained on every row of its share '
      'of `every` batches, which would not count',
      "leave out backup_workers, or use mode='async'",
    )
  return found[0]
