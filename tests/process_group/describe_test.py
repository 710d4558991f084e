"""Ranks say where they are, whatever their program does."""

import threading
import time

import numpy as np
import pytest
from absl.testing import absltest

from tests import processes
from tests.process_group import meetings


def _late(rank):
  """Rank 2 comes late to a collective; what the others hear meanwhile."""
  with meetings.meet(rank) as meeting, meeting.form() as group:
    group.annotate(f'step {rank}')
    group.barrier(name='first')
    heard = None
    if rank == 2:
      group.exchange('busy', b'')
      # In the main thread: the group answers from one of its own.
      group.exchange('asked', b'')
      group.all_reduce(np.float32([1.0]), name='late')
    else:
      thread = threading.Thread(
        target=group.all_reduce,
        args=(np.float32([1.0]),),
        kwargs={'name': 'late'},
      )
      thread.start()
      end = time.monotonic() + 60.0
      while not group.describe()['busy'] and time.monotonic() < end:
        time.sleep(0.01)
      group.exchange('busy', b'')
      heard = group.describe_ranks(timeout_seconds=60.0)
      group.exchange('asked', b'')
      thread.join(60)
    group.barrier(name='last')
    after = group.describe()
    group.barrier(name='really the last')
  return heard, after, group.describe_ranks()


def _meet_late(rank):
  """Rank 0 sees rank 1 wait in an exchange, and comes to it then."""
  with meetings.meet(rank) as meeting, meeting.form() as group:
    waiting = {}
    end = time.monotonic() + 60.0
    while rank == 0 and not waiting and time.monotonic() < end:
      waiting = group.describe_ranks(timeout_seconds=60.0)[1]['exchanges']
    group.exchange('batch 8', b'')
    return waiting, group.describe()['exchanges']


@pytest.mark.multi_process
class DescribeTest(absltest.TestCase):
  def test_who_waits_for_what(self):
    results = processes.run_workers(_late, 3)
    asked_by_0, after, closed = results[0]
    self.assertEqual([*asked_by_0], [0, 1, 2])
    for rank in (0, 1):
      said = asked_by_0[rank]
      self.assertTrue(said['busy'])
      self.assertEqual((said['sequence'], said['name']), (2, 'late'))
      self.assertGreater(said['seconds'], 0.0)
      self.assertEqual(said['note'], f'step {rank}')
    self.assertFalse(asked_by_0[2]['busy'])
    self.assertEqual(asked_by_0[2]['sequence'], 1)
    self.assertEqual(asked_by_0[2]['name'], 'first')
    self.assertEqual(asked_by_0[2]['seconds'], 0.0)
    # The others have a connection to rank 0 alone.
    self.assertEqual([*results[1][0]], [0, 1])
    self.assertEqual((after['busy'], after['name']), (False, 'last'))
    self.assertEqual([*closed], [0])

  def test_exchange_that_is_open(self):
    (waiting, after), _ = processes.run_workers(_meet_late, 2)
    self.assertEqual([*waiting], ['batch 8'])
    self.assertGreaterEqual(waiting['batch 8'], 0.0)
    self.assertEqual(after, {})

  def test_one_rank_alone(self):
    ((heard, _, _),) = processes.run_workers(_alone, 1)
    self.assertEqual([*heard], [0])


def _alone(rank):
  with meetings.meet(rank) as meeting, meeting.form() as group:
    return group.describe_ranks(timeout_seconds=0.1), None, None


if __name__ == '__main__':
  absltest.main()
