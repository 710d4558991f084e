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
  splits,
  step_task,
  unit_batches,
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
    # The strategy's: all its workers meet, whatever the variables are.
    self.settle: Callable[[Any], None] = lambda variables: None
    self.in_replica = in_replica
    self.engine, self.pool = engine, pool
    self._meets = meets
    self._step: step_task.Step | None = None
    # Batches of the next unit, while there are not enough of them, or the source
    # of each that workers read; and what was added to them last.
    self._waiting: list[batch_message.Batch | splits.Source] = []
    self._added: Any = None
    self.begun = 0  # Batches of units that were begun.
    self._meeting: Meeting | None = None
    # What steps have reported at their last meeting: float64 [count].
    self._reported = weakref.WeakKeyDictionary()

  @property
  def waiting(self) -> int:
    """How many batches wait for others."""
    return len(self._waiting)

  @property
  def source(self) -> splits.Source | None:
    """Of the batches that wait, if workers read them."""
    return _source_of(self._waiting)

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

  def train(self, step: step_task.Step, work: Any) -> Any:
    """Takes work for an engine, and begins units; returns what was reported last."""
    source = getattr(work, 'source', None)
    batches = work if source is None else [source] * len(work)
    is_another = self._waiting and self.source is not source
    if step is not self._step or is_another:
      self.end()
      self._step = step
    program = self._program(step, _structure_of(batches))
    # A call is repeated if a server was lost in it.
    if work is not self._added:
      self._waiting += batches
      if source is not None:
        source.waiting += len(batches)
      self._added = work
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
      program = self._program(self._step, _structure_of(self._waiting))
      self._begin(program, len(self._waiting))
    self.finish()

  def finish(self) -> None:
    """Waits for the units that were begun; their meeting is held."""
    if self._meeting is not None and not self._meeting.was_dropped:
      # It is kept if that fails, which may be of a moment; then it is held again.
      numbers = self._meeting.hold()
      if numbers is not None:
        self._reported[self._step] = numbers
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
    source = _source_of(batches)
    if source is not None:
      source.waiting -= count
    self.begun += count


class _Unit(worker_pool.Task):
  """Batches on which one worker trains by itself."""

  def __init__(
    self,
    units: LocalUnits,
    program: local_program.Program,
    batches: Sequence[batch_message.Batch | splits.Source],
    place: int | None = None,
  ):
    self._units, self._program = units, program
    self._engine = units.engine
    # In the caller's thread, which has the user's scopes.
    source = _source_of(batches)
    if source is None:
      self._batches = unit_batches.Sent(program, self._cached, batches)
    else:
      split = None if place is None else source.splits[place]
      self._batches = unit_batches.Read(
        program, self._cached, units.engine, source, len(batches), split
      )

  def _cached(self, key, make):
    return self._engine.cached((self._program.step, 'local', key), make)

  def _train(self, worker: int, place: int) -> list[tf.Tensor] | None:
    """Trains; what the function that ends a unit takes, or None without a batch."""
    self._own = None
    program, states = self._program, self._units.states
    self._life = states.life_of(worker)
    before = program.fetch(worker, place)
    own = states.take(place, worker, program.own)
    if any(value is None for value in own):
      fetched = program.fetch_own(worker)
      own = [f if v is None else v for v, f in zip(own, fetched, strict=True)]
    values = [*before, *own, *program.zeros()]
    values, numbers = self._batches.train(worker, values)
    if numbers is None:
      return None
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
    self.steps = len(batches)  # In the end, how many were done.
    self.reported = None
    self._number = self._engine.new_number()
    self._end = self._cached(
      'end', lambda: program.end_function(self._engine.journal)
    )

  def has_work_for(self, worker: int) -> bool:
    """See base class."""
    return self._batches.has_work_for(worker)

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
    self.steps = self._batches.steps
    if tensors is not None:
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
    self._batches.commit()
    self._engine.finished(self, worker)


class Share(_Unit):
  """The rows of a unit that one place has."""

  def __init__(self, units, program, batches, place: int):
    super().__init__(units, program, batches, place)
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
    self._engine.staleness.start(worker)
    tensors = self._train(worker, self.place)
    self.slots = None
    if tensors is not None:
      # New ones each time: a worker that was lost may still write the old ones.
      self.slots = self._engine.take_slots(self.function.layout)
      header = local_program.header(self.place, self._batches.rows)
      self.function(worker, header, self.slots, *tensors)
    self.worker = worker

  def give_up(self, worker: int) -> None:
    """See base class: who gets another token has lost its iterators."""
    self._engine.journal.revoke([worker])

  def finish(self, worker: int) -> None:
    """See base class."""
    self._engine.staleness.end(worker, 0)
    self.is_done = True

  def commit(self) -> None:
    """The meeting was held: nothing of this is done again."""
    self._batches.commit()
    if self.slots is not None:
      self.keep(self.place, self.worker)
      self._engine.release(self)

  @property
  def steps(self) -> int:
    """How many batches it has trained on."""
    return self._batches.steps


class Meeting:
  """The shares of a unit, whose mean difference updates the servers' weights."""

  def __init__(
    self,
    units: LocalUnits,
    program: local_program.Program,
    batches: Sequence[batch_message.Batch],
  ):
    self._units, self._program = units, program
    places = len(units.pool.workers)
    # A batch of few rows has none for the last places, which leave it out; and
    # those that read may have come to their ends.
    of_places = [[] for _ in range(places)]
    source = _source_of(batches)
    if source is not None:
      of_places = [
        () if split.is_at_end else batches for split in source.splits
      ]
    for batch in () if source else batches:
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

  def hold(self) -> np.ndarray | None:
    """Waits for all shares and applies them; what is reported, None if nothing is."""
    engine = self._units.engine
    engine.wait(lambda: all(share.is_done for share in self._shares))
    shares = [share for share in self._shares if share.slots is not None]
    if not shares:
      return None
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
    engine.count(max(share.steps for share in shares))
    return numbers


def _source_of(batches: Sequence[Any]) -> splits.Source | None:
  """Of batches that workers read; None for those of the coordinator, or for none."""
  first = next(iter(batches), None)
  return first if isinstance(first, splits.Source) else None


def _structure_of(batches: Sequence[Any]) -> Any:
  source = _source_of(batches)
  if source is not None:
    return source.dataset.element_spec
  return batches[0].layout(1).traced_structure


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
