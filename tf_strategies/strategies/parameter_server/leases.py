"""Leases: a worker that was given up may not write on the servers any more.

A worker that was stopped, or cut off, may return when its step has gone to
another one, and go on where it was. What it does is out of this process's hands.
So each task carries a token, and the servers know which tokens are valid: in a
worker's step each write is preceded, on its server and after all that it writes
has arrived, by a look at the token. Whoever gives a worker up makes its token
invalid first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tf_strategies.strategies.parameter_server import variables

# Tokens are used again after so many: far more than there are tasks at a time.
_NUM_TOKENS = 1024


class Leases:
  """The tokens of workers, and which of them servers accept."""

  def __init__(self, num_workers: int = 1, num_servers: int = 1):
    self.variables = [
      variables.ServerVariable(
        server=server,
        initial_value=lambda: tf.zeros([_NUM_TOKENS], tf.int64),
        trainable=False,
        name='leases',
      )
      for server in range(num_servers)
    ]
    self._lock = threading.Lock()
    # By token: 0 if it is valid.
    self._state = np.zeros([_NUM_TOKENS], np.int64)
    self._tokens = list(range(num_workers))
    self._next = num_workers

  def token(self, worker: int) -> int:
    """What the next task of a worker carries."""
    return self._tokens[worker]

  def revoke(self, workers: Iterable[int] | None = None) -> None:
    """Makes servers refuse what workers, or all, write with their tokens so far."""
    with self._lock:
      count = len(self._tokens)
      for worker in range(count) if workers is None else workers:
        self._state[self._tokens[worker]] = 1
        new = self._next % _NUM_TOKENS
        while new in self._tokens:
          new = (new + 1) % _NUM_TOKENS
        self._next = new + 1
        self._tokens[worker], self._state[new] = new, 0
      for variable in self.variables:
        with tf.device(variable.device):
          tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=tf.constant(self._state)
          )

  def check(self, token: tf.Tensor, server: int) -> tf.Tensor:
    """In a step's graph: 0 on the server if the token is valid now."""
    variable = self.variables[server]
    with tf.device(variable.device):
      return tf.raw_ops.ResourceGather(
        resource=variable.handle, indices=token, dtype=tf.int64
      )
