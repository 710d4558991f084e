"""The launcher of an elastic job does not end tasks because another one failed."""

import contextlib
import json
import os
import pathlib
import random
import signal
import time
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from tests import tiers
from tests.launch import elastic_member, programs
from tf_strategies import errors
from tf_strategies.cluster import launcher_note

# Sends the messages of `tfs.elastic.run` to the launcher without the package.
_SAY = f"""
import importlib.util
sys.path.insert(0, {str(pathlib.Path(errors.__file__).parents[1])!r})
spec = importlib.util.spec_from_file_location('note', {launcher_note.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
def say(word):
  module.say(word)
  note(word, 1)
# For all tasks of all hosts.
top = os.path.dirname(directory)
def wait_for_file(name):
  while not os.path.exists(os.path.join(top, name)):
    time.sleep(0.01)
"""
_UNTIL_THE_END = "say('elastic')\nwait_for_file('end')\n"


class _JobTest(programs.JobTestCase):
  def setUp(self):
    super().setUp()
    self.top = pathlib.Path(self.create_tempdir().full_path)

  def start(self, code, *flags, count=1):
    """Starts the launchers of a job on `count` hosts."""
    flags = ('--grace_period=2', *flags)
    started = programs.launchers(self.top, _SAY + code, flags, count)
    return [self.enter_context(launcher) for launcher in started]

  def create(self, name):
    (self.top / name).touch()

  def wait_for_message(self, launcher, words):
    launcher.wait_until(lambda: words in launcher.stderr())


class OneHostTest(_JobTest):
  @pytest.mark.smoke
  def test_other_workers_continue_after_a_kill(self):
    code = f"print('last words of', name, flush=True)\n{_UNTIL_THE_END}"
    [launcher] = self.start(code, '--num_workers=3')
    launcher.wait_for_notes('elastic', 3)
    os.kill(launcher.notes('pid')['worker_1-0'], signal.SIGKILL)
    self.wait_for_message(launcher, 'worker 1 is lost')
    self.assertLen(launcher.alive(), 2)
    self.create('end')
    self.assert_ends(launcher, 0)
    self.assertEqual(
      launcher.stderr().splitlines(),
      [
        '[launch] worker 1 is lost: killed by SIGKILL. The job is elastic: the '
        'others go on.',
        '[launch] The training has ended well without worker 1.',
        '[launch] worker 1 was lost: killed by SIGKILL. Its last lines:',
        '  last words of worker_1',
      ],
    )

  def test_tasks_that_fail_repeatedly_are_lost(self):
    code = f"""
if name in ('worker_2', 'evaluator_0'):
  wait_for('elastic', 'worker_0')
  sys.exit(3)
{_UNTIL_THE_END}
"""
    [launcher] = self.start(
      *(code, '--num_workers=3', '--evaluator', '--max_restarts=1'),
      '--grace_period=1',
    )
    for task in ('worker 2', 'evaluator 0'):
      self.wait_for_message(launcher, f'{task} is lost')
    self.assertLen(launcher.alive(), 2)
    self.create('end')
    self.assert_ends(
      launcher,
      0,
      'ended well without worker 2.',
      'was lost: exit status 3 (restarts: 1)',
    )

  def test_job_fails_when_all_workers_are_lost(self):
    code = """
say('elastic')
if name == 'worker_1':
  wait_for('elastic', 'worker_0')
  os.kill(os.getpid(), signal.SIGKILL)
wait_for_file('end')
sys.exit(4)
"""
    [launcher] = self.start(code, '--num_workers=2', '--evaluator')
    self.wait_for_message(launcher, 'worker 1 is lost')
    self.create('end')
    self.assert_ends(launcher, 137, 'worker 1 failed first: killed')


class EndTest(_JobTest):
  """Workers that are lost or still run when another worker has succeeded."""

  def test_worker_restarted_after_the_end_is_terminated(self):
    code = """
say('elastic')
if name == 'worker_1':
  sys.exit(3) if attempt == 0 else time.sleep(600)
wait_for('elastic', 'worker_1', 1)
say('trained')
"""
    [launcher] = self.start(
      code, '--num_workers=2', '--max_restarts=3', '--grace_period=0.5'
    )
    self.assert_ends(launcher, 0, 'worker 1 still runs')
    self.assertLen(launcher.notes('pid'), 3)

  def test_trained_worker_may_still_write_results(self):
    code = """
say('elastic')
if name == 'worker_0' and attempt == 0:
  sys.exit(3)
say('trained')
if name == 'worker_0':
  wait_for_file('end')
  note('written', 1)
else:
  wait_for('trained', 'worker_0', 1)
"""
    [launcher] = self.start(
      code, '--num_workers=2', '--max_restarts=1', '--grace_period=0.5'
    )
    pids = launcher.wait_for_notes('pid', 3)
    launcher.wait_until(lambda: not programs.is_running(pids['worker_1-0']))
    time.sleep(2)
    self.create('end')
    self.assert_ends(launcher, 0)
    self.assertIn('worker_0-1', launcher.notes('written'))

  def test_second_training_is_elastic_too(self):
    code = """
say('elastic')
say('trained')
say('elastic')
if name == 'worker_0' and attempt == 0:
  sys.exit(3)
wait_for('elastic', 'worker_0', 1)
"""
    [launcher] = self.start(code, '--num_workers=2', '--max_restarts=1')
    self.assert_ends(launcher, 0)
    self.assertLen(launcher.notes('pid'), 3)


class SeveralHostsTest(_JobTest):
  def start_three(self):
    started = self.start(_UNTIL_THE_END, count=3)
    for launcher in started:
      launcher.wait_for_notes('elastic', 1)
    # Hosts exchange their states in this time.
    time.sleep(1.5)
    return started

  def assert_all_end_well(self, launchers, words):
    for launcher in launchers:
      self.assertLen(launcher.alive(), 1)
    self.create('end')
    for launcher in launchers:
      self.assert_ends(launcher, 0, words)

  @parameterized.parameters((0, False), (1, True))
  def test_other_hosts_continue_without_a_lost_host(self, victim, is_whole):
    started = self.start_three()
    (started[victim].kill_all if is_whole else started[victim].kill)()
    others = [one for i, one in enumerate(started) if i != victim]
    name = f'node {victim} (127.0.0.1)'
    for launcher in others:
      self.wait_for_message(launcher, f'{name} is lost')
    started[victim].wait_until(lambda: not started[victim].alive())
    self.assert_all_end_well(others, f'ended well without {name}')

  def test_all_hosts_report_the_first_failure(self):
    code = """
index = task['index']
while index and not os.path.exists(os.path.join(top, f'go{index}')):
  time.sleep(0.01)
sys.exit(3 + index)
"""
    started = self.start(code, '--grace_period=60', count=3)
    self.wait_for_message(started[0], 'worker 0 failed')
    for index in (1, 2):
      # Hosts exchange their states in this time.
      time.sleep(1.5)
      self.create(f'go{index}')
    for launcher in started:
      self.assert_ends(launcher, 3, 'worker 0')

  def test_tasks_read_that_another_host_has_trained(self):
    code = """
say('elastic')
if name == 'worker_0':
  for word in ('trained', 'elastic', 'trained'):
    say(word)
  wait_for_file('end')
else:
  say('trained')
  while not module.is_over():
    time.sleep(0.01)
  note('over', 1)
"""
    started = self.start(code, count=2)
    started[1].wait_for_notes('over', 1)
    self.create('end')
    for launcher in started:
      self.assert_ends(launcher, 0)

  def test_lost_results_fail_the_job_on_all_hosts(self):
    code = """
say('elastic')
say('trained')
if name == 'worker_1':
  wait_for_file('go')
  os.kill(os.getpid(), signal.SIGKILL)
wait_for_file('end')
"""
    started = self.start(code, count=3)
    for launcher in started:
      launcher.wait_for_notes('trained', 1)
    self.create('go')
    self.wait_for_message(started[1], 'worker 1 is lost')
    time.sleep(1)
    self.assertLen(started[0].alive(), 1)
    self.create('end')
    for launcher in started:
      self.assert_ends(launcher, 137, 'worker 1')

  def test_sigterm_to_a_launcher_ends_only_its_host(self):
    first, *others = self.start_three()
    first.signal(signal.SIGTERM)
    self.assert_ends(first, 143)
    self.assert_all_end_well(others, 'node 0')

  @parameterized.parameters(False, True)
  def test_interrupt_ends_all_hosts(self, is_late):
    started = self.start_three()
    if is_late:
      # This launcher sees the signal and the end of its sender at the same time.
      started[2].signal(signal.SIGSTOP)
    started[1].signal(signal.SIGINT)
    if is_late:
      self.assertEqual([one.wait() for one in started[:2]], [130, 130])
      started[2].signal(signal.SIGCONT)
    for launcher in started:
      self.assert_ends(launcher, 130)
    self.assertIn(
      'node 1 (127.0.0.1) failed: killed by SIGINT', started[0].stderr()
    )


class RandomFaultsTest(_JobTest):
  """Jobs that add numbers in groups, on one or several hosts."""

  @tiers.parameters(
    (3, 2, 0),
    *(
      tiers.soak(count, slots, part)
      for count, slots in ((1, 4), (1, 12), (3, 2))
      for part in range(1, 13)
    ),
  )
  def test_workers_without_faults_continue(self, count, slots, part):
    seed = int(os.environ.get('TFS_SEED', random.randrange(10**6))) + part
    print(f'TFS_SEED={seed - part}, part {part}')
    self.chance = random.Random(f'{seed} {count} {slots}')
    self.slots = slots
    self.lost_hosts = set()
    everyone = set(range(count * slots))
    self.failing = set()
    if self.chance.random() < 0.3:
      self.failing = {self.chance.choice(sorted(everyone))}
    failing = ','.join(map(str, self.failing))
    self.enter_context(mock.patch.dict(os.environ, FAILING=failing))
    member = [elastic_member.__file__, str(self.top)]
    self.launchers = self.start(
      f'os.execv(sys.executable, [sys.executable, *{member}])',
      f'--num_workers={slots}',
      f'--max_restarts={self.chance.choice([0, 2])}',
      '--grace_period=1',
      count=count,
    )
    able = everyone - self.failing
    # One working task is spared, so that the state is kept.
    self.spared = self.chance.choice(sorted(able))
    while not all(self._progress(task).exists() for task in able):
      self._check_alive()
    first_pids = {task: self._pid(task) for task in able}
    self.hit = set(self.failing)
    faults = []
    for _ in range(5):
      time.sleep(self.chance.uniform(0, 2))
      faults += self._do_faults()
      self._check_alive()
    self.create('finish')
    statuses = {
      rank: launcher.wait()
      for rank, launcher in enumerate(self.launchers)
      if rank not in self.lost_hosts
    }
    results = {
      int(path.name.rpartition('-')[2]): json.loads(path.read_text())
      for path in self.top.glob('result-*')
    }
    text = '\n'.join(one.output() + one.stderr() for one in self.launchers)
    print(f'faults {len(faults)}: {faults}, {statuses}, {sorted(results)}')
    self.assertContainsSubset(everyone - self.hit, results, text)
    for task in everyone - self.hit:
      self.assertEqual(self._pid(task), first_pids[task])
    for steps, state in results.values():
      self.assertEqual(state, elastic_member.expected(steps))
    for rank, status in statuses.items():
      tasks = range(rank * slots, (rank + 1) * slots)
      if 0 not in self.lost_hosts or not results.keys().isdisjoint(tasks):
        self.assertEqual(status, 0, text)

  def _check_alive(self):
    # Other launchers may end: when all their workers and the first launcher are lost.
    launcher = self.launchers[self.spared // self.slots]
    if not launcher.is_alive():
      launcher.fail('ended too early')
    time.sleep(0.01)

  def _progress(self, task):
    return self.top / f'progress-{task}'

  def _pid(self, task):
    return json.loads(self._progress(task).read_text())['pid']

  def _workers(self):
    """Returns the running processes by task."""
    return {
      int(name.partition('_')[2].partition('-')[0]): pid
      for launcher in self.launchers
      for name, pid in launcher.notes('pid').items()
      if programs.is_running(pid)
    }

  def _do_faults(self):
    """Causes one or two faults. Returns the kind and the victim of each."""
    kinds = ['kill', 'kill', 'kill', 'stop']
    if len(self.launchers) > 1:
      kinds += ['launcher', 'host', 'evict', 'freeze']
    kind = self.chance.choice(kinds)
    home = self.spared // self.slots
    hosts = set(range(len(self.launchers))) - {home} - self.lost_hosts
    if kind in ('launcher', 'host', 'evict'):
      if not hosts:
        return []
      victim = self.chance.choice(sorted(hosts))
      self.lost_hosts.add(victim)
      self.hit.update(range(victim * self.slots, (victim + 1) * self.slots))
      launcher = self.launchers[victim]
      if kind == 'host':
        launcher.kill_all()
      else:
        launcher.signal(signal.SIGTERM if kind == 'evict' else signal.SIGKILL)
      return [(kind, victim)]
    if kind == 'freeze':
      victim = self.chance.choice(sorted({home} | hosts))
      self.launchers[victim].signal(signal.SIGSTOP)
      time.sleep(self.chance.uniform(0, 3))
      self.launchers[victim].signal(signal.SIGCONT)
      return [(kind, victim)]
    workers = self._workers()
    tasks = sorted(workers.keys() - {self.spared} - self.failing)
    tasks = self.chance.sample(
      tasks, min(len(tasks), self.chance.choice([1, 2]))
    )
    self.hit.update(tasks)
    numbers = [signal.SIGKILL]
    if kind == 'stop':
      numbers = [signal.SIGSTOP, signal.SIGCONT]
    for number in numbers:
      for task in tasks:
        with contextlib.suppress(ProcessLookupError):
          os.kill(workers[task], number)
      if number == signal.SIGSTOP:
        time.sleep(self.chance.uniform(0, 8))
    return [(kind, task) for task in tasks]


if __name__ == '__main__':
  absltest.main()
