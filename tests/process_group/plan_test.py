from absl.testing import absltest, parameterized

from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.process_group import plan


class PlanTest(parameterized.TestCase):
  @parameterized.product(
    algorithm=tuple(ALGORITHMS),
    world_size=(1, 2, 3, 5, 8),
    length=(0, 1, 37),
  )
  def test_both_ends_of_a_link_agree(self, algorithm, world_size, length):
    schedule = ALGORITHMS[algorithm](world_size)
    plans = [
      # Ends may cut differently: the link carries bytes.
      plan.from_schedule(
        schedule, rank, length, plan.Format(2, piece_bytes=10 + 2 * rank)
      )
      for rank in range(world_size)
    ]
    self.assert_links(plans)

  @parameterized.parameters(1, 2, 3, 6)
  def test_patterns_agree_too(self, world_size):
    ranks = range(world_size)
    sizes = tuple(5 * r for r in ranks)
    for plans in (
      [
        plan.broadcast(world_size, r, world_size - 1, 50, 16, False)
        for r in ranks
      ],
      [
        plan.broadcast(world_size, r, world_size // 2, 50, 16, True)
        for r in ranks
      ],
      [plan.gather(r, sizes, 3) for r in ranks],
      [plan.ring_gather(r, sizes, 3) for r in ranks if world_size > 1],
    ):
      self.assert_links(plans)

  def assert_links(self, plans):
    for src, sender in enumerate(plans):
      for dst, numbers in sender.sends.items():
        sent = sum(
          sender.pieces[n].stop - sender.pieces[n].start for n in numbers
        )
        self.assertIn(src, plans[dst].receives)
        got = sum(
          plans[dst].pieces[n].stop - plans[dst].pieces[n].start
          for n in plans[dst].receives[src]
        )
        self.assertEqual(sent, got)
    for dst, receiver in enumerate(plans):
      for src in receiver.receives:
        self.assertIn(dst, plans[src].sends)

  def test_ring_sends_the_least_bytes(self):
    for world_size in (2, 3, 4):
      for rank in range(world_size):
        made = plan.by_name(
          'ring', world_size, rank, 1200, plan.Format(4, piece_bytes=100)
        )
        self.assertEqual(
          made.bytes_sent, 2 * (world_size - 1) * 4800 // world_size
        )

  def test_nothing_waits_for_itself(self):
    for world_size in (2, 4, 5):
      for build in ALGORITHMS.values():
        made = plan.from_schedule(
          build(world_size), 0, 40, plan.Format(1, piece_bytes=3)
        )
        needs = list(made.needs)
        ready = [n for n, count in enumerate(needs) if not count]
        done = 0
        while ready:
          done += 1
          for other in made.unlocks[ready.pop()]:
            needs[other] -= 1
            if not needs[other]:
              ready.append(other)
        self.assertLen(made.pieces, done)


if __name__ == '__main__':
  absltest.main()
