"""Rendezvous of up to 1,000 processes, and of a few processes under many faults.

The clock, the sockets, and the faults of processes and hosts are simulated. The
protocol is the real one; see `simulated_network`.
"""

import asyncio
import os
import random
import statistics

from absl.testing import absltest, parameterized

from tests import tiers
from tests.process_group import simulated_network
from tf_strategies import process_group

_SEED = int(os.environ.get('TFS_SEED', '20261123'))
_CASES = int(os.environ.get('TFS_CASES', '4'))
_OPTIONS = {'secret': b'of a simulated job', 'min_workers': 'majority'}


def _members(process):
  return [m.task for m in process.group.members]


async def _wait_until(condition, seconds):
  loop = asyncio.get_running_loop()
  end = loop.time() + seconds
  while not condition():
    if loop.time() > end:
      raise AssertionError(f'failed for {seconds} s: {condition.__doc__}')
    await asyncio.sleep(0.05)


async def _form(count, missing, lost, seed):
  """Forms a group of all present processes. Returns them and the seconds it took."""
  rng = random.Random(seed)
  absent = set(rng.sample(range(1, count), missing))
  options = process_group.GroupOptions(
    rendezvous_timeout_seconds=300.0, **_OPTIONS
  )
  with simulated_network.Network(count, seed, lost) as network:
    # For some missing tasks the host is missing too.
    network.silent.update(t for t in absent if t % 2)
    began = network.loop.time()
    processes = []
    for task in network.addresses:
      if task not in absent:
        processes.append(simulated_network.Process(network, task, options))
    searches = []
    for process in processes:
      await asyncio.sleep(0.0 if count < 100 else rng.uniform(0, 2.0 / count))
      searches.append(process.spawn(process.form))
    await asyncio.gather(*searches)
    return processes, network.loop.time() - began


class FormationTest(parameterized.TestCase):
  @tiers.parameters(
    (3, 0, 0.0),
    (100, 5, 0.02),
    tiers.soak(1000, 0, 0.0),
    tiers.soak(1000, 50, 0.02),
  )
  def test_present_processes_form_one_group(self, count, missing, lost):
    there, seconds = simulated_network.run(_form, count, missing, lost, _SEED)
    for process in there:
      self.assertIsNone(process.error)
      self.assertEqual(process.group.generation, there[0].group.generation)
      self.assertEqual(_members(process), [p.task for p in there])
    # Most have few connections. Only the lowest task is contacted by all.
    self.assertLess(statistics.median(p.most_open for p in there), 25)
    self.assertLess(seconds, 60)


async def _reconnect():
  """Forms two groups of one, and ends the cut between them. One gives way."""
  options = process_group.GroupOptions(
    secret=b'of a simulated job', min_workers=1, rendezvous_timeout_seconds=90.0
  )
  with simulated_network.Network(2) as network:
    network.cut([0], [1])
    first, second = (
      simulated_network.Process(network, task, options, progress)
      for task, progress in enumerate((3, 7))
    )
    await asyncio.gather(first.spawn(first.form), second.spawn(second.form))
    sizes = [len(_members(process)) for process in (first, second)]
    network.heal()
    await _wait_until(lambda: not second.is_in_group, 60)
    # The group with the lowest task does not give way.
    is_whole, reason = first.is_in_group, second.group._state.failure.message
    waits = second.spawn(second.form)
    await _wait_until(lambda: first.group._control.joiners() == (1,), 60)
    await first.spawn(first.form)
    await waits
    seats = [[m.progress for m in p.group.members] for p in (first, second)]
    return sizes, is_whole, reason, seats


class RivalGroupsTest(absltest.TestCase):
  def test_reconnected_groups_merge(self):
    sizes, is_whole, reason, seats = simulated_network.run(_reconnect)
    self.assertEqual(sizes, [1, 1])
    self.assertTrue(is_whole)
    self.assertIn('gives way', reason)
    self.assertEqual(seats, [[3, 7]] * 2)


class _Job:
  """A job whose processes and network fail at random and recover.

  A launcher restarts dead processes. Like the elastic strategy, each process forms a
  new group when its group has failed or lost a member, or a process waits to join.
  """

  def __init__(self, network, rng):
    self.network, self.rng = network, rng
    self.processes = network.processes
    self.options = process_group.GroupOptions(
      rendezvous_timeout_seconds=60.0, window_seconds=1.0, **_OPTIONS
    )
    # The tasks of each complete group, at any time.
    self.whole = set()

  def start(self, task, is_first=False):
    self.network.silent.discard(task)
    process = simulated_network.Process(self.network, task, self.options)
    process.spawn(self._live, process, is_first)

  async def _live(self, process, is_first):
    await process.form(may_be_alone=is_first)
    while not process.error:
      await asyncio.sleep(self.rng.uniform(0.05, 0.15))
      if not self.is_content(process):
        await process.form()
    process.kill()  # A process that gives up ends, and is restarted.

  def is_content(self, process):
    """Returns whether a process continues with its group."""
    if not process.is_in_group:
      return False
    plane, shared = process.group._control, process.group._state
    return not (plane.joiners() or shared.departed)

  @property
  def alive(self):
    """The processes that are alive."""
    return [p for p in self.processes.values() if p.is_alive]

  def working(self):
    """Returns the groups that work: those whose members are all in the group."""
    groups = {}
    for process in self.alive:
      if process.is_in_group:
        key = (process.group.generation, *_members(process))
        groups.setdefault(key, set()).add(process.task)
    return [key for key, there in groups.items() if set(key[1:]) == there]

  def are_rivals(self):
    """Returns whether two groups work at a time, except in the permitted case.

    The permitted case (limits.md): a majority of the processes restarted without
    memory, and cannot reach the few that are still alive.
    """
    half = len(self.network.addresses) / 2
    groups = self.working()
    old = [tasks for generation, *tasks in groups if generation > 1]
    is_new = any(generation == 1 for generation, *_ in groups)
    return len(groups) > 1 and not (
      is_new and len(old) == 1 and len(old[0]) <= half
    )

  def is_one_group(self):
    """Returns whether all processes that are alive are in one group."""
    everyone = sorted(p.task for p in self.alive)
    [first, *others] = self.working() or [None]
    return first is not None and not others and list(first[1:]) == everyone

  def fault(self):
    """Causes a random fault."""
    rng, network = self.rng, self.network
    alive = self.alive
    victims = rng.sample(alive, min(len(alive), rng.randint(1, 3)))
    kinds = ['kill', 'kill', 'vanish', 'cut', 'isolate', 'heal']
    dead = [t for t, p in self.processes.items() if not p.is_alive]
    match rng.choice(kinds) if alive else 'heal':
      case 'kill':
        for process in victims:
          process.kill()
      case 'vanish':
        victims[0].vanish()
      case 'cut':  # A pair, or two halves.
        tasks = list(network.addresses)
        rng.shuffle(tasks)
        at = rng.choice([1, len(tasks) // 2])
        network.cut(tasks[:at], tasks[at : at + rng.choice([1, len(tasks)])])
      case 'isolate':
        network.cut([victims[0].task], network.addresses)
      case 'heal':
        network.heal()
    for task in dead:
      self.start(task)


async def _run_with_faults(count, faults, seed):
  """Runs a job under random faults. Returns groups that worked at the same time."""
  rng = random.Random(seed)
  with simulated_network.Network(count, seed, lost=0.01) as network:
    job = _Job(network, rng)
    for task in network.addresses:
      job.start(task, is_first=True)
    await _wait_until(job.is_one_group, 60)
    rivals = []
    for _ in range(faults):
      job.fault()
      # Sometimes before the previous fault is handled.
      for _ in range(rng.choice([1, 5, 40, 200])):
        await asyncio.sleep(0.1)
        if job.are_rivals():
          rivals.append(job.working())
    network.heal()
    network.silent.clear()
    for task, process in list(job.processes.items()):
      if not process.is_alive:
        job.start(task)
    await _wait_until(job.is_one_group, 180)
    await asyncio.sleep(5.0)
    # One for control and one for data per peer. Failed proposals must leave none.
    open_ = max(len(p.open_sockets) for p in job.alive)
    if open_ > 3 * count:
      raise AssertionError(f'{open_} sockets are open')
    return rivals


class FaultsTest(parameterized.TestCase):
  @tiers.parameters(
    (3, 0),
    (8, 0),
    *(tiers.soak(8, part) for part in range(1, 25)),
    *(tiers.soak(25, part) for part in range(25)),
  )
  def test_only_one_group_works_at_a_time(self, count, part):
    for case in range(part * _CASES, (part + 1) * _CASES):
      seed = f'{_SEED} {count} {case}'
      with self.subTest(seed):
        rivals = simulated_network.run(_run_with_faults, count, 10, seed)
        self.assertEqual(rivals, [])


if __name__ == '__main__':
  absltest.main()
