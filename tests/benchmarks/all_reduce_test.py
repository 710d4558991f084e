"""Peers take turns, bytes follow the formulas, and reports have their form."""

import itertools
import os

import tensorflow as tf

from benchmarks import measure, report
from tf_strategies import errors


class MeasureTest(tf.test.TestCase):
  def take_turns(self):
    called = []
    functions = {n: lambda n=n: called.append(n) for n in 'abcd'}
    measure.take_turns(functions, rounds=20, repeats=2, warmup=1)
    return [''.join(called[i : i + 12]) for i in range(0, len(called), 12)]

  def test_peers_take_turns_and_none_always_follows_the_same(self):
    turns = self.take_turns()
    self.assertLen(turns, 20)
    before = {}
    for turn in turns:
      self.assertCountEqual(
        [turn[i : i + 3] for i in range(0, 12, 3)], ['aaa', 'bbb', 'ccc', 'ddd']
      )
      for first, second in itertools.pairwise(turn[::3]):
        before.setdefault(second, set()).add(first)
    self.assertEqual(set(map(len, before.values())), {3})
    self.assertEqual(self.take_turns(), turns)

  def test_times_the_calls_alone(self):
    now = [0.0]

    def spend(seconds):
      now[0] += seconds

    found = measure.take_turns(
      {'a': lambda: spend(1.0), 'b': lambda: spend(5.0)},
      rounds=2,
      repeats=3,
      warmup=2,
      clock=lambda: now[0],
    )
    self.assertEqual(found, {'a': [1.0] * 6, 'b': [5.0] * 6})


class ReportTest(tf.test.TestCase):
  def test_target_is_checked(self):
    directory = self.create_tempdir().full_path
    report.check_target('report_json', None)
    report.check_target('report_json', os.path.join(directory, 'a.json'))
    for path in (directory, os.path.join(directory, 'b', 'a.json')):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, 'report_json'):
        report.check_target('report_json', path)


if __name__ == '__main__':
  tf.test.main()
