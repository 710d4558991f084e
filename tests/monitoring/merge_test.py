"""Clocks are aligned within the reported accuracy when timelines are merged."""

import json
import os
import random

import pytest
from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.monitoring import merge, recorder, timeline


def _run(seed, count=200, offset=0.0, drift=0.0):
  """Returns the all-reduces of two tasks. The second task has its own clock."""
  draw = random.Random(seed)
  first, second = {}, {}
  now = 0.0
  for sequence in range(1, count + 1):
    begins = [now + draw.uniform(0, 40) for _ in range(2)]
    # A collective ends only after all tasks have begun it.
    ends = [max(begins) + draw.uniform(5, 30) for _ in range(2)]
    first[sequence] = (begins[0], ends[0])
    second[sequence] = tuple(
      t * (1 + drift) + offset for t in (begins[1], ends[1])
    )
    now = max(ends) + draw.uniform(0, 500)
  return first, second


def _trace(rank, spans, kind='all_reduce', generation=1):
  events = [
    recorder.Event(
      'reduce/bucket_0',
      recorder.COMMUNICATION,
      int(begin * 1e3),
      int(end * 1e3),
      1,
      {
        'kind': kind,
        'sequence': sequence,
        'generation': generation,
        'handed_ns': int(begin * 1e3),
      },
    )
    for sequence, (begin, end) in spans.items()
  ]
  return timeline.build(events, rank)


def _begins(trace, pid):
  return {
    e['args']['sequence']: e['ts']
    for e in trace['traceEvents']
    if e['ph'] == 'X' and e['pid'] == pid
  }


class ClockSyncTest(parameterized.TestCase):
  def test_offset_is_found_within_the_accuracy(self):
    offset = -7e6
    first, second = _run(0, offset=offset)
    found = merge.estimate(first, second)
    self.assertEqual(found.collectives, 200)
    self.assertLessEqual(abs(found.ahead_by(0.0) - offset), found.accuracy)
    # About half of the shortest collective, not of the longest.
    self.assertLess(found.accuracy, 10.0)
    self.assertEqual(found.drift, 0.0)

  def test_drift_is_found(self):
    first, second = _run(0, count=2000, offset=1e4, drift=2e-4)
    found = merge.estimate(first, second)
    for sequence in (1, 1000, 2000):
      shown = second[sequence][1]
      true = shown - (shown - 1e4) / (1 + 2e-4)
      self.assertLess(abs(found.ahead_by(shown) - true), 15.0)
    # A single offset for all would be wrong by half of this.
    self.assertGreater(second[2000][1] * 2e-4, 100.0)


class MergeTest(parameterized.TestCase):
  @pytest.mark.smoke
  def test_collectives_overlap_on_both_tasks(self):
    first, second = _run(0, offset=5e6)
    merged = merge.merge([_trace(0, first), _trace(1, second)])
    (zero, one) = merged['otherData']['tasks']
    self.assertEqual(zero['clock_ahead_us'], 0.0)
    self.assertLessEqual(abs(one['clock_ahead_us'] - 5e6), one['accuracy_us'])
    spans = [e for e in merged['traceEvents'] if e['ph'] == 'X']
    self.assertLen(spans, 400)
    self.assertAlmostEqual(min(e['ts'] for e in spans), 0.0, delta=60.0)
    for sequence in first:
      a, b = (
        next(
          e
          for e in spans
          if e['pid'] == pid and e['args']['sequence'] == sequence
        )
        for pid in (0, 1)
      )
      self.assertLess(a['ts'], b['ts'] + b['dur'])
      self.assertLess(b['ts'], a['ts'] + a['dur'])

  @parameterized.named_parameters(
    # The root of a broadcast may finish before another rank begins.
    ('broadcast', 'broadcast', 1),
    # Sequence numbers start again.
    ('another_generation', 'all_reduce', 2),
  )
  def test_not_compared(self, kind, generation):
    first, second = _run(0)
    merged = merge.merge(
      [_trace(0, first), _trace(1, second, kind, generation)]
    )
    task = merged['otherData']['tasks'][1]
    self.assertEqual(task['common_collectives'], 0)
    self.assertIsNone(task['accuracy_us'])

  def test_wall_clocks_where_nothing_is_in_common(self):
    one = _trace(0, {1: (1000.0, 1005.0)})
    other = _trace(1, {2: (50.0, 60.0)})
    # 3 seconds later, by a clock with another origin.
    other['otherData']['origin_unix_seconds'] = (
      one['otherData']['origin_unix_seconds'] + 3.0
    )
    merged = merge.merge([one, other])
    apart = _begins(merged, 1)[2] - _begins(merged, 0)[1]
    self.assertAlmostEqual(apart, 3e6, delta=5.0)

  def test_command(self):
    directory = self.create_tempdir().full_path
    paths = [os.path.join(directory, f'{i}.json') for i in range(2)]
    for path, rank, spans in zip(paths, (0, 1), _run(3), strict=True):
      timeline.write(_trace(rank, spans), path)
    output = os.path.join(directory, 'all.json')
    flag = f'--output={output}'
    self.assertEqual(merge.main(['merge', *paths, flag]), 0)
    self.assertEqual(merge.main(['merge', paths[0], 'missing.json', flag]), 1)
    for arguments in ([flag], paths):
      self.assertEqual(merge.main(['merge', *arguments]), 2)
    with open(output, encoding='utf-8') as f:
      self.assertLen(_begins(json.load(f), 1), 200)

  def test_no_timeline(self):
    path = self.create_tempfile(content='{"otherData": 1}').full_path
    with self.assertRaisesRegex(errors.DataError, 'Expected a file written by'):
      merge.load(path)


if __name__ == '__main__':
  absltest.main()
