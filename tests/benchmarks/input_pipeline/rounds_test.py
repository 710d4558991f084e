"""Processes take turns; one that fails or hangs costs its own row alone."""

import os
import sys
import time

import psutil
from absl.testing import absltest, parameterized

from benchmarks.input_pipeline import children, results, rounds
from tf_strategies import errors

_DEADLINE_S = 30.0
# Answers as a variant does: ten items a step; in what ways it can fail is its
# name.
_FAKE = """
import json, os, sys, time
runs = 0
for line in sys.stdin:
  request = json.loads(line)
  if request['do'] == 'open':
    how = request['spec']['how']
    answer = {}
  if request['do'] == 'run':
    runs += 1
    if how == 'hangs' and runs == 2:
      time.sleep(600)
    if how == 'dies':
      print('the reason', file=sys.stderr)
      os._exit(7)
    steps = 0 if how == 'empty' else 5
    answer = {'seconds': 0.5, 'first_batch_s': 0.1, 'fetch_s': 0.5,
              'num_steps': steps, 'num_items': 10 * steps}
  if request['do'] == 'profile':
    answer = None
  said = {'error': 'ValueError: no'} if how == 'raises' else {'value': answer}
  print(json.dumps(said), flush=True)
"""


def _measure(hows, deadline_s=_DEADLINE_S, train_step_s=0.0):
  specs = {how: {'how': how} for how in hows}
  return rounds.measure(
    specs,
    lambda name: [sys.executable, '-c', _FAKE],
    num_rounds=3,
    train_step_s=train_step_s,
    deadline_s=deadline_s,
  )


class RoundsTest(parameterized.TestCase):
  def test_every_round_is_counted(self):
    (row,) = _measure(['works'], train_step_s=0.1)
    self.assertEqual(row.error, '')
    self.assertEqual(row.rates, [100.0] * 3)
    self.assertEqual(row.first_batch_ms, [100.0] * 3)
    self.assertEqual(row.prep_ms, [100.0] * 3)
    self.assertEqual(row.step_ms, [100.0] * 3)

  @parameterized.parameters(
    ('dies', 'ended by itself .status 7.*the reason'),
    ('raises', 'ValueError: no'),
    ('empty', 'yields no batch'),
  )
  def test_failure_is_told_in_its_row(self, how, words):
    good, bad = _measure(['works', how])
    self.assertLen(good.rates, 3)
    self.assertEmpty(good.error)
    self.assertRegex(bad.error.replace('\n', ' '), words)
    self.assertIn('failed', results.table([good, bad], 0.0))
    self.assertIn(f'{how}: failed', results.verdicts([good, bad])[0])

  def test_hang_ends_at_the_deadline(self):
    start = time.monotonic()
    good, bad = _measure(['works', 'hangs'], deadline_s=3.0)
    self.assertLess(time.monotonic() - start, _DEADLINE_S)
    self.assertLen(good.rates, 3)
    self.assertIn('did not answer within 3 s', bad.error)

  def test_no_process_is_left(self):
    # The test runner may have children already: Python's resource tracker
    # lives as long as the process that ever shared memory with another one.
    this = psutil.Process(os.getpid())
    before = set(this.children())
    child = children.Child('fake', [sys.executable, '-c', _FAKE], _DEADLINE_S)
    with child:
      child.ask({'do': 'open', 'spec': {'how': 'works'}})
      found = list(set(this.children()) - before)
      self.assertLen(found, 1)
    self.assertFalse(found[0].is_running())

  def test_interpreter_that_is_not_there(self):
    with self.assertRaisesRegex(errors.WorkerUnavailableError, 'cannot run'):
      children.Child('torch_0', ['/no/such/python'], _DEADLINE_S)


class ResultsTest(absltest.TestCase):
  def test_ratios_name_their_target(self):
    rows = [
      rounds.Row('naive_arrays', [10.0]),
      rounds.Row('make_dataset', [100.0, 200.0, 300.0]),
      rounds.Row('torch_0', [50.0]),
      rounds.Row('torch_2', [150.0]),
    ]
    self.assertEqual(
      results.comparisons(rows),
      [
        'make_dataset ÷ naive_arrays: 20.00 (target 15: met)',
        'make_dataset ÷ torch_2: 1.33 (target 1.5: missed)',
      ],
    )

  def test_step_is_compared_with_the_longer_part(self):
    row = rounds.Row('naive', [10.0], prep_ms=[4.0], step_ms=[9.0])
    table = results.table([row], train_step_ms=6.0)
    self.assertIn('|                    1.50 |', table)

  def test_ratio_with_a_failed_row_is_none(self):
    rows = [rounds.Row('a', [1.0]), rounds.Row('b', error='x')]
    self.assertIsNone(results.ratio(rows, 'a', 'b'))


if __name__ == '__main__':
  absltest.main()
