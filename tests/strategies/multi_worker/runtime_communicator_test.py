"""TensorFlow's runtime reports a dead peer within the deadline."""

import os
import time

from absl.testing import absltest

import tf_strategies as tfs
from tests import processes

_TIMEOUT_SECONDS = 4.0


def _exchange(rank):
  """Exits on rank 1. Returns the error of rank 0 and its delay."""
  strategy = tfs.MultiWorkerCollectiveStrategy(
    options=tfs.CollectiveOptions(timeout_seconds=_TIMEOUT_SECONDS)
  )
  exchange = strategy.extended.communicator.exchange
  values = exchange('before', rank)
  if rank == 1:
    os._exit(0)
  started = time.monotonic()
  try:
    exchange('after', None)
  except tfs.errors.Error as e:
    seconds = time.monotonic() - started
    return values, type(e).__name__, e.rank, str(e), seconds
  return None


class ExchangeTest(absltest.TestCase):
  def test_dead_peer_is_named_within_the_deadline(self):
    with processes.ProcessGroup(deadline=120) as group:
      addresses = processes.addresses(2)
      for rank in range(2):
        config = processes.tf_config({'worker': addresses}, rank)
        group.start_function(
          rank, _exchange, (rank,), {'TF_CONFIG': config}, exits_at_once=True
        )
      (outcome,) = group.wait_for([0])
    values, kind, rank, message, seconds = outcome.result()
    self.assertEqual(values, [0, 1])
    self.assertIn(kind, ('CollectiveTimeoutError', 'WorkerUnavailableError'))
    self.assertEqual(rank, 1)
    self.assertIn("exchange 'after'", message)
    self.assertLess(seconds, 2 * _TIMEOUT_SECONDS)


if __name__ == '__main__':
  absltest.main()
