"""`Members`: the groups of an elastic job, and the state that their workers share.

A group does a step of a model as a whole or not at all: variables are written after
the last collective of the step. When a group ends, one worker may be a step behind
another, because it did not hear of the last collective, but never more. The workers
that are left then form another group in the middle of the step. A worker that is
behind takes the state and skips the step; the others repeat it with the same batch. A
worker that joins takes the state and the position. The group that lets it in ends as
if a worker had died.
"""

import collections
import json
import os
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from tf_strategies import errors, process_group
from tf_strategies.checkpoint import checkpointer
from tf_strategies.cluster import launcher_note
from tf_strategies.fault_tolerance import elastic_options, elastic_state
from tf_strategies.keras import chief_only
from tf_strategies.strategies.multi_worker import input as input_lib
from tf_strategies.strategies.multi_worker import strategy as strategy_lib

# The phase of a worker that joins: in a step of a model, at the end of the training,
# at the begin of `job.fit`, or elsewhere.
_END, FIT, _ELSEWHERE = 'end', 'fit', 'elsewhere'
_INSIDE = ('train', 'within', 'test', _END)
# Phases in which a worker from another phase cannot join.
_CLOSED = ('within', 'test', _END)


class MembershipChange(errors.Error):
  """Other workers wait to join: the group forms again."""


class CallAgain(errors.Error):
  """The training function has to be called again to continue with these workers."""


_SAME_BATCHES = (
  'use the same data on all workers, seed what is shuffled, and let '
  'make_batches(epoch, step) count epochs of steps_per_epoch batches'
)

# What must be equal on all workers of a group: name, description, fix, and the error
# if it is no `CollectiveMismatchError`.
_MUST_BE_SAME = (
  (
    'set_up',
    'the set-up of the strategy',
    'pass the same options and devices on all workers',
  ),
  (
    'fit',
    'epochs and steps_per_epoch of job.fit',
    'pass the same ones on all workers',
  ),
  (
    'files',
    'the list of callbacks of job.fit that write files',
    'pass the same callbacks with the same paths on all workers',
  ),
  (
    'variables',
    'the list of variables (dtypes and shapes)',
    'run the same program on all workers',
    errors.CheckpointMismatchError,
  ),
)

_LOST = errors.WorkerUnavailableError, errors.CollectiveTimeoutError
# Failures after which another group may succeed.
RECOVERABLE = *_LOST, MembershipChange


class Generation(NamedTuple):
  """One group of workers."""

  number: int
  world_size: int


class Members:
  """The groups that this worker forms with others, one after the other.

  Args:
    options: the options of the job.
    rendezvous: forms the groups.
    capacity: the largest number of workers.

  Attributes:
    capacity: the largest number of workers.
    generations: the groups in which this worker took part.
  """

  def __init__(
    self,
    options: elastic_options.ElasticOptions,
    rendezvous: process_group.Rendezvous,
    capacity: int,
  ):
    self.capacity = capacity
    self.generations: list[Generation] = []
    self._rendezvous = rendezvous
    self._options = options
    self._state = elastic_state.SharedState()
    # Notes in the directory of the job that its training is complete.
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

  def _share(self) -> None:
    """Takes the state of the group, if this worker is in one."""
    if self._communicator.is_member:
      self._synchronise(self._communicator.group, _ELSEWHERE)

  def _let_in(self) -> None:
    """Raises MembershipChange if workers wait to join and may."""
    if self._state.is_in_last_epoch_of_fit:
      return
    group = self._communicator.group
    members = {member.task for member in group.members}
    outside = [t for t in group.pending_joiners() if t not in members]
    if outside and group.world_size < self.capacity:
      raise MembershipChange(f'{len(outside)} workers wait to join.')

  def run_step(self, kind, compute, undo, batch=None):
    """Runs a step of a model until a group has done it.

    Args:
      kind: 'train' or 'test'; 'within' for a training step after the first of
        several that Keras asks for at once.
      compute: function that does the step.
      undo: function that restores the state from before the step after `compute` has
        raised an error.
      batch: batch of the step, the same on all workers. Without it, only these workers
        can do the step, and no others repeat it.

    Returns:
      What `compute` returned; None if the others did the step without this one.
    """
    while True:
      try:
        if kind == 'train':
          self._let_in()
        if batch is not None:
          self._check_batch(batch)
        outputs = compute()
      except RECOVERABLE as e:
        undo()
        if batch is None or not self._state.is_one_fit:
          raise
        self._leave(e)
        if self.enter(kind):
          return None
      else:
        self._state.count_step()
        return outputs

  def _finish(self) -> None:
    """Returns when every worker has come to the end: none may need another.

    Tells workers that come late that the training is complete.
    """
    while self._communicator.is_member:
      try:
        self._communicator.group.barrier(name='the end of the training')
        break
      except RECOVERABLE as e:
        self._leave(e)
        try:
          self.enter(_END)
        except errors.RendezvousError as e:
          # Nobody is left who may need this one: the training is done.
          logging.info('The others have ended: %s', e)
          break
    if self._marks is not None:
      self._marks.mark_finished()

  def _check_finished(self) -> None:
    """Raises JobFinishedError for a worker that comes too late."""
    source = None
    if self._marks is not None and self._marks.is_finished:
      source = self._marks.directory
    elif not self._state.order and launcher_note.is_over():
      source = 'the launcher'
    if source is not None:
      raise errors.JobFinishedError(
        f'The training of this job has been completed, as {source} says. Fix: '
        'nothing is left to do; for another training start another job, or pass '
        'another ElasticOptions(directory=...).'
      )

  def _abort(self, error: BaseException) -> None:
    """Tells the others why this worker leaves its training function."""
    if self._communicator.is_member and not isinstance(error, _LOST):
      reason = str(error)
      if not isinstance(error, MembershipChange | CallAgain):
        reason = f'its training function raised {type(error).__name__}: {error}'
      self._communicator.group.abort(reason)

  def _fail(self, error: errors.Error) -> None:
    """Counts a failure; raises it after too many without a step in between."""
    order = self._state.order
    if order != self._order_at_failure:
      self._failures, self._order_at_failure = 0, order
    self._failures += not isinstance(error, MembershipChange | CallAgain)
    if self._failures > self._options.max_failures:
      raise error

  def _check_batch(self, batch):
    """Compares batches: a group's first one, and those of steps 0, 1, 2, 4, ...

    The data of a worker that joins may begin with another batch.
    """
    number = self._state.num_steps
    if not self._has_compared or number & (number - 1) == 0:
      self._has_compared = True
      input_lib.check_same(
        self._communicator,
        f'batch/{number}',
        f'batch {number}',
        tf.nest.flatten(batch, expand_composites=True),
        _SAME_BATCHES,
      )

  def check_same(
    self, answers, what, fix, error=errors.CollectiveMismatchError
  ):
    """Raises an error unless all workers, by rank, have given the same answer.

    A worker that differs leaves, and the others continue.

    The workers that have been there longest decide which answer is right. If they
    disagree and no answer has a majority, all workers raise the error.
    """
    texts = [json.dumps(answer) for answer in answers]
    came = self._all_came or [0] * len(answers)
    votes = collections.Counter(
      text for text, when in zip(texts, came, strict=True) if when == min(came)
    )
    (right, count), *others = votes.most_common()
    is_tie = bool(others) and others[0][1] == count
    wrong = [r for r, text in enumerate(texts) if text != right]
    if not wrong:
      return
    group = self._communicator.group
    if not is_tie and group.rank not in wrong:
      raise MembershipChange(f'{group.members[wrong[0]]} differs in {what}.')
    shown = texts.index(right), *wrong
    said = [f'{group.members[r]} has {answers[r]}' for r in shown]
    raise error(
      f'Expected {what} to be the same on all workers: {", ".join(said)}. '
      f'Fix: {fix}.'
    )

  # Groups.

  def _leave(self, error) -> None:
    """Leaves a group that has failed, or that other workers wait to join."""
    group = self._communicator.group
    logging.warning(
      'Generation %d ended at %s: %s Forming again.',
      group.generation,
      self._state.position,
      error,
    )
    self._abort(error)
    group.close()
    self._fail(error)

  def enter(self, phase: str = _ELSEWHERE) -> bool:
    """Forms a group; returns whether it has done the step that this worker is in."""
    while True:
      group = self._rendezvous.form(
        self._state.order,
        is_closed=phase in _CLOSED,
        # Others that were started again too, or still train, have the state.
        may_be_alone=bool(self._state.order) or not _was_restarted(),
        check=self._check_finished,
      )
      try:
        self._communicator.enter(group)
        self._has_compared, self._all_came = False, []
        self.generations.append(Generation(group.generation, group.world_size))
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
    """Gives all workers the state of the most advanced one.

    Returns whether the group has done the step that this worker is in.
    """
    state = self._state
    if not state.may_share():
      return False
    own_seed, seed = strategy_lib.proposed_seed()
    answers = self._ask(group, phase, seed)
    best = max(
      group.members,
      key=lambda m: (m.progress, bool(answers[m.rank]['group']), -m.rank),
    )
    if not best.progress and _was_restarted():
      logging.warning(
        'This worker was restarted, and no worker has the state of this job any '
        'more: training begins again at epoch 0.'
      )
    theirs = answers[best.rank]
    strategy_lib.take_seed(own_seed, theirs['seed'])
    for name, *about in _MUST_BE_SAME:
      said = [a[name] for a in answers]
      if None not in said:
        self.check_same(said, *about)
    have = [
      bool(a['group'])
      and (a['group'], m.progress) == (theirs['group'], best.progress)
      for a, m in zip(answers, group.members, strict=True)
    ]
    if not all(have):
      enters_fit = theirs['phase'] in _INSIDE and phase == FIT
      state.take(group, best.rank, have[group.rank], enters_fit)
    state.group = [group.generation, group.members[0].incarnation]
    is_inside = phase in _INSIDE
    behind = theirs['steps'] - state.num_steps
    if not is_inside or behind > 1:
      state.continue_at(theirs)
    elif behind:
      state.skip_step(theirs['scalars'])
    state.num_steps = theirs['steps']
    if is_inside and behind > 1:
      raise CallAgain(f'This worker is {behind} steps behind the others.')
    phases = [a['phase'] for a in answers]
    is_mixed = any(p not in _INSIDE for p in phases)
    if is_inside and is_mixed and not set(_CLOSED).isdisjoint(phases):
      raise CallAgain('A worker joined where it cannot begin.')
    return is_inside and behind == 1

  def _ask(self, group, phase, seed):
    """Returns what each worker, by rank, says of its state."""
    state = self._state
    if not state.order:
      self._came = group.generation
    is_in_fit = phase != _ELSEWHERE
    mine = {
      'came': self._came,
      'fit': state.fit if is_in_fit else None,
      'files': chief_only.files_of(state.callbacks) if is_in_fit else None,
      'phase': phase,
      'steps': state.num_steps,
      'scalars': state.scalars,
      'position': [*state.position],
      'iterations': state.iterations,
      'history': state.history,
      'set_up': state.strategy.set_up,
      'seed': seed,
      'group': state.group,
      'variables': state.describe(),
    }
    answers = group.exchange('elastic/state', mine)
    self._all_came = [a['came'] for a in answers]
    return answers


def _was_restarted() -> bool:
  """Returns whether this task was restarted, as the launcher says."""
  return os.environ.get('TFS_RESTART_COUNT', '0') != '0'
