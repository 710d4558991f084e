"""The workers of worker_pool_test.py."""

import os
import time


class Actor:
  def __init__(self, rank):
    self._rank = rank

  def describe(self):
    return [self._rank, os.getpid()]

  def fail_on(self, rank):
    """Raises on one rank. The other ranks wait forever."""
    if self._rank == rank:
      raise ValueError(f'a message from rank {rank}')
    time.sleep(3600)

  def die_on(self, rank):
    if self._rank == rank:
      print('last words', flush=True)
      os._exit(7)
    time.sleep(3600)
