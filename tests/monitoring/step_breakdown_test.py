"""The parts of a step: no part is longer than the part that contains it."""

import random

from absl.testing import absltest, parameterized

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
  def test_wait_is_part_of_communication(self):
    # The waiting thread began 5 before the first collective and continues 9
    # after the end of the last.
    found = step_breakdown.break_down(
      (0, 100),
      [
        _collective(45, 50, 60),
        _collective(58, 60, 81),
        _event(recorder.WAIT, 40, 90),
      ],
    )
    self.assertEqual(found.communication, [(45, 81)])
    self.assertEqual(found.wait, [(45, 81)])
    self.assertEqual(found.compute, [(0, 45), (81, 100)])

  def test_wait_for_a_batch_is_no_wait_for_collectives(self):
    found = step_breakdown.break_down(
      (0, 100),
      [
        _collective(10, 10, 60),
        _event(recorder.WAIT, 20, 50),
        _event(recorder.INPUT, 30, 40),
      ],
    )
    self.assertEqual(found.wait, [(20, 30), (40, 50)])

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
      self.assertLessEqual(length(found.wait), length(found.communication))
      parts = [*found.input, *found.wait, *found.compute]
      self.assertEqual(length(parts), 100)
      self.assertEqual(step_breakdown.union(parts), [(0, 100)])
      exposed += length(found.wait)
    self.assertGreater(exposed, 0)


class IntervalsTest(parameterized.TestCase):
  @parameterized.parameters(
    ([], [(0, 10)]),
    ([(0, 10)], []),
    ([(-5, 20)], []),
    ([(2, 4), (3, 6), (9, 30)], [(0, 2), (6, 9)]),
    ([(5, 5)], [(0, 10)]),
    ([(-3, 1), (1, 2)], [(2, 10)]),
  )
  def test_subtract(self, parts, expected):
    self.assertEqual(step_breakdown.subtract((0, 10), parts), expected)


if __name__ == '__main__':
  absltest.main()
