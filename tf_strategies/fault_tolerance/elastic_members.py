"""Who takes part in an elastic job, and that all of them have the same state.

A step of a model is done by a whole group or not at all: variables are written once
every collective of it is over. A worker may be one step behind another when the group
ends, since it may not have heard of the last collective; never more. So when a group
has ended, the workers that are left form another one, in the step that they were in;
one that is behind gets the state, and leaves out the step; the others repeat it with
the same batch. A worker that comes is handed the state and the place, and begins
there. The group that lets it in ends as one ends from which a worker has died.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import time

from absl import logging

from tf_strategies import errors, process_group
from tf_strategies.checkpoint import checkpointer
from tf_strategies.fault_tolerance import elastic_options, elastic_state
from tf_strategies.strategies.multi_worker import elastic
from tf_strategies.strategies.multi_worker import input as input_lib
from tf_strategies.strategies.multi_worker import strategy as strategy_lib

# Where a worker is when it joins: in a model's step; at the end of the training; at
# the begin of `job.fit`; elsewhere.
_END, _FIT, _ELSEWHERE = 'end', 'fit', 'elsewhere'
_INSIDE = ('train', 'within', 'test', _END)
# Where nobody from elsewhere can go on with the others.
_CLOSED = ('within', 'test', _END)


class MembershipChange(errors.Error):
  """Other workers wait to join: the group forms again."""


class CallAgain(errors.Error):
  """The training function has to be called again to go on with these workers."""


_SAME_BATCHES = (
  'use the same data on all workers, seed what is shuffled, and let '
  'make_batches(epoch, step) count epochs of steps_per_epoch batches'
)

# What a group with other workers may not meet again.
RECOVERABLE = (
  errors.WorkerUnavailableError,
  errors.CollectiveTimeoutError,
  MembershipChange,
)


@dataclasses.dataclass
class Generation:
  """One group of workers, as seen by one of them; times are `time.time()`."""

  number: int
  world_size: int
  rank: int
  began: float
  first_step: float | None = None  # When its first step ended.
  ended: float | None = None
  reason: str = ''  # Why it ended; empty at the end of training.


class Members(elastic.Membership):
  """The groups that this worker forms with others, one after the other.

  Args:
    rendezvous: forms them.
    capacity: the most workers that there can be.
    options: of the job.
    state: that the workers share.
  """

  def __init__(
    self,
    rendezvous: process_group.Rendezvous,
    capacity: int,
    options: elastic_options.ElasticOptions,
    state: elastic_state.State,
  ):
    self.capacity = capacity
    self.generations: list[Generation] = []
    self.is_fitting = False
    self._rendezvous = rendezvous
    self._options = options
    self._state = state
    # Where it says that the job is done.
    self._marks: checkpointer.Checkpointer | None = None
    if options.directory is not None:
      self._marks = checkpointer.Checkpointer(options.directory)
    self._failures, self._order_at_failure = 0, 0
    # The generation in which this worker got its state; and all of the group, by rank.
    self._came = 0
    self._all_came: list[int] = []
    # Whether the workers of this group have compared a batch.
    self._has_compared = False

  @property
  def _communicator(self):
    return self._state.strategy.extended.communicator

  def join(self) -> None:
    """See base class."""
    if not self._communicator.is_member:
      self._enter(_ELSEWHERE)

  def join_in_fit(self) -> None:
    """Joins with a model whose steps are built."""
    if not self._communicator.is_member:
      self._enter(_FIT)

  def share(self) -> None:
    """Takes the state of the group, if this worker is in one."""
    if self._communicator.is_member:
      self._synchronise(self._communicator.group, _ELSEWHERE)

  def hold_metrics(self, model):
    """See base class."""
    self._state.hold_metrics(model)

  def let_in(self, is_new_epoch: bool) -> None:
    """Raises MembershipChange if workers wait to join and may."""
    join, group = self._options.join, self._communicator.group
    is_closed = self._state.is_in_last_epoch_of_fit or join == 'never'
    if is_closed or (join == 'epoch' and not is_new_epoch):
      return
    limit = self._options.max_workers
    members = {member.task for member in group.members}
    outside = [t for t in group.pending_joiners() if t not in members]
    if outside and (limit is None or group.world_size < limit):
      raise MembershipChange(f'{len(outside)} workers wait to join.')

  def run_step(self, kind, compute, undo, batch=None):
    """See base class."""
    while True:
      try:
        if kind == 'train':
          self.let_in(is_new_epoch=not self._state.progress.step)
        if batch is not None:
          self._check_batch(batch)
        outputs = compute()
      except RECOVERABLE as e:
        undo()
        if batch is None or not self._state.is_one_fit:
          raise
        self._leave(e)
        if self._enter(kind):
          return None
      else:
        self._state.num_steps += 1
        self.note_step()
        return outputs

  def note_step(self) -> None:
    """Notes the time of a generation's first step."""
    if self.generations and self.generations[-1].first_step is None:
      self.generations[-1].first_step = time.time()

  def wait_for_all(self) -> None:
    """Returns when every worker has come to the end: none may need another."""
    while self._communicator.is_member:
      try:
        self._communicator.group.barrier(name='the end of the training')
        break
      except RECOVERABLE as e:
        self._leave(e)
        try:
          self._enter(_END)
        except errors.RendezvousError as e:
          # Nobody is left who may need this one: the training is done.
          logging.info('The others have ended: %s', e)
          break

  def mark_finished(self) -> None:
    """Tells those who come late that nothing is left to do."""
    if self._marks is not None:
      self._marks.mark_finished()

  def check_finished(self) -> None:
    """Raises JobFinishedError for a worker that comes too late."""
    if self._marks is not None and self._marks.is_finished:
      raise errors.JobFinishedError(
        f'The training of this job has been completed, as {self._marks.directory} '
        'says. Fix: nothing is left to do; for another training pass another '
        'ElasticOptions(directory=...).'
      )

  def end(self, reason: str) -> None:
    """Notes why a generation has ended."""
    if self.generations and self.generations[-1].ended is None:
      self.generations[-1].ended = time.time()
      self.generations[-1].reason = reason

  def abort(self, error: BaseException) -> None:
    """Tells the others why this worker leaves its training function."""
    if not self._communicator.is_member:
      return
    group = self._communicator.group
    if isinstance(error, MembershipChange | CallAgain):
      group.abort(str(error))
    elif not isinstance(error, RECOVERABLE):
      reason = f'its training function raised {type(error).__name__}: {error}'
      group.abort(reason)

  def fail(self, error: errors.Error) -> None:
    """Counts a failure; raises it after too many without a step in between."""
    order = self._state.order
    if order != self._order_at_failure:
      self._failures, self._order_at_failure = 0, order
    self._failures += not isinstance(error, MembershipChange | CallAgain)
    if self._failures > self._options.max_failures:
      raise error

  def _check_batch(self, batch):
    """Compares batches: a group's first one, and those of steps 0, 1, 2, 4, ...

    A worker that comes may take the place in the data for another one.
    """
    number = self._state.num_steps
    if not self._has_compared or number & (number - 1) == 0:
      self._has_compared = True
      input_lib.check_same_batch(
        self._communicator,
        f'batch/{number}',
        f'batch {number}',
        batch,
        _SAME_BATCHES,
      )

  def check_same(
    self, answers, what, fix, error=errors.CollectiveMismatchError
  ):
    """See base class: who differs from the others leaves, and they go on.

    Those who have been there longest say what is right. If they disagree and none
    has a majority, all raise the error.
    """
    came = self._all_came or [0] * len(answers)
    votes = collections.Counter(
      json.dumps(a)
      for a, when in zip(answers, came, strict=True)
      if when == min(came)
    )
    (right, count), *others = votes.most_common()
    is_tie = bool(others) and others[0][1] == count
    wrong = [r for r, a in enumerate(answers) if json.dumps(a) != right]
    if not wrong:
      return
    group = self._communicator.group
    if not is_tie and group.rank not in wrong:
      raise MembershipChange(f'{group.members[wrong[0]]} differs in {what}.')
    reference = next(r for r in range(len(answers)) if r not in wrong)
    said = [f'{group.members[r]} has {answers[r]}' for r in (reference, *wrong)]
    raise error(
      f'{what} is not the same on all workers: {", ".join(said)}. Fix: {fix}.'
    )

  # Groups.

  def _leave(self, error) -> None:
    """Leaves a group that has failed, or that others are to join."""
    group = self._communicator.group
    self.end(str(error))
    if isinstance(error, MembershipChange):
      group.abort(str(error))
    group.close()
    logging.warning(
      'Generation %d ended at %s: %s Forming again.',
      group.generation,
      self._state.position,
      error,
    )
    self.fail(error)

  def _enter(self, phase: str) -> bool:
    """Forms a group; returns whether it has done the step that this worker is in."""
    is_closed = phase in _CLOSED
    while True:
      group = self._rendezvous.form(
        self._state.order,
        is_closed=is_closed,
        # Others that were started again too, or still train, have the state.
        may_be_alone=bool(self._state.order) or not _was_restarted(),
        check=self.check_finished,
      )
      try:
        self._communicator.enter(group)
        self._has_compared, self._all_came = False, []
        self.generations.append(
          Generation(
            group.generation, group.world_size, group.rank, time.time()
          )
        )
        has_done = self._synchronise(group, phase)
      except RECOVERABLE as e:
        self._leave(e)
      except BaseException:
        group.close()
        raise
      else:
        if len(self.generations) > 1:
          # As loud as the warning that the one before ended.
          logging.warning(
            'Generation %d goes on at %s; workers: %d.',
            group.generation,
            self._state.position,
            group.world_size,
          )
        return has_done

  # The state.

  def _synchronise(self, group, phase) -> bool:
    """Takes the state of the most advanced; returns whether that has done this step."""
    state = self._state
    if not state.may_share():
      return False
    own_seed, seed = strategy_lib.proposed_seed()
    if not state.order:
      self._came = group.generation
    told = {
      'came': self._came,
      'fit': state.fit if phase in (*_INSIDE, _FIT) else None,
      'files': state.files if phase in (*_INSIDE, _FIT) else None,
      'are_common': state.files_are_common,
      'phase': phase,
      'steps': state.num_steps,
      'state': state.progress,
      'set_up': state.strategy.set_up,
      'seed': seed,
      'shared': state.is_shared,
      'variables': state.describe(),
    }
    answers = [
      json.loads(answer)
      for answer in group.exchange('elastic/state', json.dumps(told).encode())
    ]
    self._all_came = [a['came'] for a in answers]
    self.check_same(
      [a['set_up'] for a in answers],
      'the set-up of the strategy',
      'pass the same options and devices on all workers',
    )
    if all(a['fit'] for a in answers):
      self.check_same(
        [a['fit'] for a in answers],
        'epochs and steps_per_epoch of job.fit',
        'pass the same ones on all workers',
      )
    best = max(
      group.members,
      key=lambda m: (m.progress, answers[m.rank]['shared'], -m.rank),
    )
    theirs = answers[best.rank]
    strategy_lib.take_seed(own_seed, theirs['seed'])
    phases = [a['phase'] for a in answers]
    self.check_same(
      [a['variables'] for a in answers],
      'the list of variables (dtypes and shapes)',
      'run the same program on all workers',
      errors.CheckpointMismatchError,
    )
    have = [
      a['shared'] and m.progress == best.progress
      for a, m in zip(answers, group.members, strict=True)
    ]
    enters = phase == _FIT and phases[best.rank] in _INSIDE
    if not all(have):
      state.take(group, best.rank, not have[group.rank], is_entering=enters)
    if _FIT in phases and phases[best.rank] in _INSIDE:
      state.share_callbacks(group, best.rank, is_missing=enters)
    is_mixed = any(p not in _INSIDE for p in phases)
    files = [a['files'] for a in answers]
    if phases[best.rank] not in _INSIDE:
      state.files_are_common = None not in files and files.count(
        files[0]
      ) == len(files)
    else:
      state.files_are_common = theirs['are_common']
    if theirs['are_common'] and None not in files:
      self.check_same(
        files,
        'the list of callbacks of job.fit that write files',
        'pass the same callbacks with the same paths on all workers',
      )
    if phase in _INSIDE and is_mixed and not set(_CLOSED).isdisjoint(phases):
      raise CallAgain('A worker joined where it cannot begin.')
    state.is_shared = True
    behind = theirs['steps'] - state.num_steps
    if phase not in _INSIDE:
      state.continue_at(theirs['state'], theirs['steps'])
      return False
    if behind > 1:
      raise CallAgain(f'This worker is {behind} steps behind the others.')
    state.num_steps = theirs['steps']
    return behind == 1


def _was_restarted() -> bool:
  """Returns whether this task was restarted, as the launcher says."""
  return os.environ.get('TFS_RESTART_COUNT', '0') != '0'
