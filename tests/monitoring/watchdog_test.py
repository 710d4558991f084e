"""The watchdog tells once a deadline, and names the stalled rank."""

import os
import queue
import threading
import time

from absl.testing import absltest

from tf_strategies.monitoring import watchdog

_DEADLINE_SECONDS = 60.0


def _in(sequence, name='reduce/bucket_1', busy=True, note='step 4'):
  return {
    'sequence': sequence,
    'busy': busy,
    'name': name,
    'text': f'all_reduce(sum) {name!r}',
    'seconds': 2.0,
    'note': note,
  }


_NAMES = ['rank 0', 'rank 1', 'rank 2']


class ExplainTest(absltest.TestCase):
  def test_rank_that_has_not_come(self):
    said = {
      0: _in(9),
      1: _in(8, 'reduce/bucket_0', busy=False, note='what follows step 3'),
      2: _in(9),
    }
    lines = watchdog.explain(0, _NAMES, said).splitlines()
    self.assertStartsWith(lines[0], 'rank 0 waits in step 4')
    self.assertIn('"reduce/bucket_1"', lines[0])
    self.assertIn('(sequence 9)', lines[0])
    self.assertIn('rank 1 has not reached it: in what follows step 3', lines[1])
    self.assertIn('reduce/bucket_0', lines[1])
    self.assertEqual(lines[-1], 'stalled: rank 1')

  def test_rank_that_is_still_in_an_earlier_one(self):
    said = {0: _in(9), 1: _in(9), 2: _in(7)}
    lines = watchdog.explain(0, _NAMES, said).splitlines()
    self.assertEqual(lines[-1], 'stalled: rank 2')

  def test_rank_that_does_not_answer(self):
    lines = watchdog.explain(0, _NAMES, {0: _in(9), 2: _in(9)}).splitlines()
    self.assertStartsWith(lines[1], 'rank 1 does not answer')
    self.assertEqual(lines[-1], 'stalled: rank 1')

  def test_another_rank_knows_of_rank_0_alone(self):
    lines = watchdog.explain(
      2, _NAMES, {0: _in(8, busy=False), 2: _in(9)}
    ).splitlines()
    self.assertStartsWith(lines[1], 'rank 2 waits')
    self.assertEqual(lines[2], 'stalled: rank 0')
    self.assertIn('see its log', lines[3])

  def test_exchange_beside_the_collectives(self):
    waits = {**_in(9, busy=False), 'exchanges': {'batch 8': 3.25}}
    said = {0: waits, 1: _in(9, busy=False), 2: waits}
    lines = watchdog.explain(0, _NAMES, said).splitlines()
    self.assertEndsWith(
      lines[0], '; waits for all ranks in exchange "batch 8", for 3.2 s'
    )
    self.assertEndsWith(lines[1], '; has not reached exchange "batch 8"')
    self.assertEqual(lines[-1], 'stalled: rank 1')

  def test_nobody_waits(self):
    said = {r: _in(9, busy=False) for r in range(3)}
    text = watchdog.explain(0, _NAMES, said)
    self.assertIn('no rank waits', text)
    self.assertNotIn('stalled:', text)

  def test_all_are_in_it(self):
    text = watchdog.explain(0, _NAMES, {r: _in(9) for r in range(3)})
    self.assertIn('no data arrives', text)


class WatchdogTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._path = os.path.join(self.create_tempdir().full_path, 'a', 'dog.log')

  def _watch(self, seconds, describe):
    dog = watchdog.Watchdog(seconds, describe, self._path)
    self.addCleanup(dog.close)
    return dog

  def _read(self):
    if not os.path.exists(self._path):
      return ''
    with open(self._path, encoding='utf-8') as f:
      return f.read()

  def _wait_for(self, text):
    end = time.monotonic() + _DEADLINE_SECONDS
    while text not in self._read():
      self.assertLess(time.monotonic(), end, self._read())
      time.sleep(0.02)
    return self._read()

  def test_late_step_is_told_with_all_stacks(self):
    go_on = threading.Event()

    def a_function_that_waits():
      go_on.wait(_DEADLINE_SECONDS)

    thread = threading.Thread(target=a_function_that_waits, name='the waiter')
    thread.start()
    self.addCleanup(thread.join)
    self.addCleanup(go_on.set)
    dog = self._watch(0.2, lambda: 'rank 0 waits\nstalled: rank 1')
    text = self._wait_for('a_function_that_waits')
    self.assertIn('no step has finished for', text)
    self.assertIn('  rank 0 waits\n  stalled: rank 1\n', text)
    self.assertIn(f'the waiter is 0x{thread.ident:x}', text)
    dog.step_finished()
    self._wait_for('steps resumed')

  def test_steps_in_time_are_not_told(self):
    dog = self._watch(20.0, lambda: 'a report')
    for _ in range(20):
      dog.step_finished()
      time.sleep(0.01)
    dog.close()
    self.assertEqual(self._read(), '')

  def test_step_that_ends_while_others_are_asked_is_not_told(self):
    times = []

    def describe():
      times.append(1)
      dog.step_finished()
      return 'a report'

    dog = self._watch(0.05, describe)
    end = time.monotonic() + _DEADLINE_SECONDS
    while len(times) < 3:
      self.assertLess(time.monotonic(), end)
      time.sleep(0.01)
    dog.close()
    self.assertEqual(self._read(), '')

  def test_failing_description_does_not_end_the_watch(self):
    def fail():
      raise ValueError('the group is closed')

    self._watch(0.1, fail)
    text = self._wait_for('ValueError: the group is closed')
    self.assertIn('Current thread', text)

  def test_nothing_is_left_to_wait_for(self):
    said = queue.Queue()
    answers = [None, None, 'a report']

    def describe():
      answer = answers.pop(0)
      said.put(answer)
      return answer

    dog = self._watch(0.05, describe)
    said.get(timeout=_DEADLINE_SECONDS)
    time.sleep(0.3)
    self.assertTrue(said.empty())  # It has not asked again.
    dog.step_finished()
    said.get(timeout=_DEADLINE_SECONDS)
    self.assertEqual(self._read(), '')
    dog.step_began()
    self._wait_for('a report')

  def test_nobody_is_asked_about_a_step_that_finished_in_the_pause(self):
    asked = queue.Queue()
    dog = self._watch(0.4, lambda: asked.put(time.monotonic()))
    dog.pause()
    time.sleep(0.6)  # In the middle of a wait of 0.4 seconds.
    dog.step_finished()
    finished = time.monotonic()
    asked_at = asked.get(timeout=_DEADLINE_SECONDS)
    self.assertGreaterEqual(asked_at - finished, 0.39)

  def test_silent_while_it_is_paused(self):
    dog = self._watch(0.1, lambda: 'a report')
    dog.pause()
    time.sleep(0.4)
    self.assertEqual(self._read(), '')
    dog.step_began()
    self._wait_for('a report')


if __name__ == '__main__':
  absltest.main()
