"""Small payloads beside the collectives, from several threads at once."""

import concurrent.futures

import numpy as np
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import meetings


def _many(rank):
  """Four threads in another order on every rank, beside collectives."""
  with meetings.meet(rank) as meeting, meeting.form() as group:
    tags = [f'tag {i}' for i in range(40)]
    tags = tags[rank * 7 :] + tags[: rank * 7]
    # A thread waits for the others' calls: all tags must be open at once.
    with concurrent.futures.ThreadPoolExecutor(len(tags)) as pool:
      futures = {
        tag: pool.submit(group.exchange, tag, f'{rank} {tag}'.encode())
        for tag in tags
      }
      sums = [
        group.all_reduce(np.int64([rank + i]), name=f'{i}')[0]
        for i in range(50)
      ]
    results = {tag: future.result() for tag, future in futures.items()}
    large = group.exchange('large', bytes([rank]) * (1 << 20))
    group.barrier()
    return results, sums, [(len(p), p[0]) for p in large]


class ExchangeTest(parameterized.TestCase):
  @tiers.parameters(tiers.soak(1), 2, tiers.soak(4))
  def test_calls_meet_by_tag_whatever_their_order(self, world_size):
    results = processes.run_workers(_many, world_size)
    for payloads, sums, large in results:
      for tag, got in payloads.items():
        expected = [f'{r} {tag}'.encode() for r in range(world_size)]
        self.assertEqual(got, expected)
      ranks = sum(range(world_size))
      self.assertEqual(sums, [ranks + world_size * i for i in range(50)])
      self.assertEqual(large, [(1 << 20, r) for r in range(world_size)])


if __name__ == '__main__':
  absltest.main()
