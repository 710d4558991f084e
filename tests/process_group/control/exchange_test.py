"""Small payloads beside the collectives, from several threads at once."""

import concurrent.futures

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import meetings
from tf_strategies import errors, process_group
from tf_strategies.cluster import workers


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


def _agreements(rank):
  with meetings.meet(rank) as meeting, meeting.form() as group:
    workers.agree(group.exchange, {'b': 1, 'a': [1.5, None]}, 'settings')
    try:
      workers.agree(group.exchange, 64 if rank else 32, 'global_batch_size')
    except errors.CollectiveMismatchError as e:
      told = str(e), e.ranks
    # The group is none the worse for it.
    total = group.all_reduce(np.int64([rank]))[0]
    workers.agree(group.exchange, 7, 'global_batch_size')
    group.barrier()
    return told, total


def _alone(rank):
  options = {'collective_timeout_seconds': 1.0}
  with meetings.meet(rank, **options) as meeting, meeting.form() as group:
    try:
      if rank == 1:
        processes.wait_until(lambda: group.failure is not None)
        raise group.failure
      group.exchange('meeting', b'')
    except errors.CollectiveTimeoutError as e:
      return str(e), e.rank, e.tensor


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

  @pytest.mark.smoke
  def test_agree_names_what_who_and_both_values(self):
    results = processes.run_workers(_agreements, 3)
    for (message, ranks), total in results:
      self.assertEqual(ranks, (1, 2))
      self.assertIn('global_batch_size', message)
      self.assertIn('rank 0 has 32', message)
      self.assertIn('rank 2 has 64', message)
      self.assertEqual(total, 3)

  def test_who_did_not_come_is_named_on_every_rank(self):
    results = processes.run_workers(_alone, 3)
    for message, rank, tag in results:
      self.assertEqual((rank, tag), (1, 'meeting'))
      self.assertIn("exchange 'meeting' did not finish within 1 s", message)
      self.assertIn('rank 1 (task 1 at ', message)


class LimitsTest(absltest.TestCase):
  def test_unusable_arguments(self):
    with (
      process_group.Rendezvous({0: '127.0.0.1:0'}, 0) as meeting,
      meeting.form() as group,
    ):
      with self.assertRaisesRegex(ValueError, '1048577 bytes'):
        group.exchange('tag', bytes((1 << 20) + 1))
      self.assertEqual(group.exchange('tag', b'x'), [b'x'])


if __name__ == '__main__':
  absltest.main()
