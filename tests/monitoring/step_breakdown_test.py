"""The parts of a step: no part is longer than the part that contains it."""

import random

from absl.testing import absltest

from tf_strategies.monitoring import recorder, step_breakdown


def _event(category, begin, end, **args):
  return recorder.Event('e', category, begin, end, 1, args)


def _collective(handed, begin, end):
  return _event(
    recorder.COMMUNICATION,
    *(begin, end),
    kind='all_reduce',
    sent=8,
    handed_ns=handed,
  )


class BreakdownTest(absltest.TestCase):
  def test_parts_of_any_step(self):
    draw = random.Random(1)
    exposed = 0
    for _ in range(300):
      events = []
      for _ in range(draw.randrange(8)):
        begin = draw.randrange(-20, 110)
        end = begin + draw.randrange(1, 60)
        kind = draw.choice(['wait', 'input', 'communication'])
        if kind == 'communication':
          events.append(_collective(begin - draw.randrange(5), begin, end))
        else:
          events.append(_event(kind, begin, end))
      found = step_breakdown.break_down((0, 100), events)
      length = step_breakdown.length
      self.assertLessEqual(
        length(found['wait']), length(found['communication'])
      )
      parts = [part for kind in step_breakdown.PARTS for part in found[kind]]
      # One begins where another ends.
      begins, ends = zip(*sorted(parts), strict=True)
      self.assertEqual((0, *ends), (*begins, 100))
      exposed += length(found['wait'])
    self.assertGreater(exposed, 0)


if __name__ == '__main__':
  absltest.main()
