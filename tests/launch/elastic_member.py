"""A worker of a small elastic job, with a process group and without TensorFlow.

  elastic_member.py DIRECTORY

In each step every worker adds its part of the numbers, until the file `finish` is in
the directory. `expected` returns the correct sums, independent of faults.
"""

import json
import os
import pathlib
import sys
import time

import numpy as np

from tf_strategies import cluster, errors, process_group
from tf_strategies.cluster import launcher_note

_PARTS = 60
_MODULUS = 1_000_003
_STEP_SECONDS = 0.02
_SIZE = 3


def add(state, total):
  """Returns the next state, which depends on the order and number of steps."""
  return (3 * state + total) % _MODULUS


def part(step, rank, world_size):
  """Returns the part of a rank: each number belongs to one rank."""
  numbers = np.arange(rank, _PARTS, world_size)
  return np.array([np.sum((numbers + step) ** k) for k in range(1, _SIZE + 1)])


def expected(steps):
  """Returns the state after `steps` steps with any number of workers."""
  state = np.zeros([_SIZE], np.int64)
  for step in range(steps):
    state = add(state, part(step, 0, 1))
  return state.tolist()


class _Member:
  """Trains with all present workers, like the workers of `tfs.elastic`."""

  def __init__(self, directory, rendezvous, was_restarted):
    self._directory = directory
    self._rendezvous = rendezvous
    self._was_restarted = was_restarted
    self._step, self._state = 0, np.zeros([_SIZE], np.int64)

  def run(self):
    """Runs until the end. Returns the steps and the state."""
    ends = False
    while True:
      try:
        group = self._form()
      except errors.RendezvousError:
        if not ends:
          raise
        break  # The others have ended.
      ends = joins = False
      try:
        self._share(group)
        while not ends and not joins:
          ends, joins = self._do_step(group)
        if ends:
          group.barrier(name='the end')
          break
      except (
        errors.WorkerUnavailableError,
        errors.CollectiveTimeoutError,
      ) as e:
        print('forming again:', e, flush=True)
      finally:
        group.close()
    return self._step, self._state.tolist()

  def _form(self):
    return self._rendezvous.form(
      self._step, may_be_alone=bool(self._step) or not self._was_restarted
    )

  def _share(self, group):
    best = max(group.members, key=lambda m: (m.progress, -m.rank))
    self._state = group.broadcast(self._state, best.rank, name='state')
    self._step = best.progress

  def _do_step(self, group):
    """Does a step. Returns whether it was the last, and whether workers wait to join."""
    time.sleep(_STEP_SECONDS)
    members = {member.task for member in group.members}
    flags = [
      (self._directory / 'finish').exists(),
      any(task not in members for task in group.pending_joiners()),
    ]
    numbers = part(self._step, group.rank, group.world_size)
    numbers = np.concatenate([numbers, np.int64(flags)])
    *total, ends, joins = group.all_reduce(numbers, name='step').tolist()
    self._state = add(self._state, np.int64(total))
    self._step += 1
    self._note(group)
    return ends, joins

  def _note(self, group):
    task = group.members[group.rank].task
    path = self._directory / f'progress-{task}'
    temporary = path.with_suffix(f'.{os.getpid()}')
    temporary.write_text(json.dumps({'pid': os.getpid(), 'step': self._step}))
    os.replace(temporary, path)


def main(directory):
  """Runs the member. Writes its steps and state to `result-<task>`."""
  directory = pathlib.Path(directory)
  config = cluster.ClusterConfig.from_env()
  task = config.training_index
  if str(task) in os.environ.get('FAILING', '').split(','):
    while not list(directory.glob('progress-*')):
      time.sleep(0.01)
    sys.exit('this worker fails on every start')
  launcher_note.say(launcher_note.ELASTIC)
  options = process_group.GroupOptions.from_env(
    min_workers=process_group.MAJORITY,
    window_seconds=0.5,
    heartbeat_timeout_seconds=6.0,
    rendezvous_timeout_seconds=20.0,
  )
  addresses = {i: t.address for i, t in enumerate(config.training_tasks)}
  rendezvous = process_group.Rendezvous(addresses, task, options)
  member = _Member(
    directory, rendezvous, os.environ['TFS_RESTART_COUNT'] != '0'
  )
  result = member.run()
  rendezvous.close()
  (directory / f'result-{task}').write_text(json.dumps(result))


if __name__ == '__main__':
  main(sys.argv[1])
