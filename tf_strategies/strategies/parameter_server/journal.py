"""Records on servers which workers may write, and which writes are done.

A stopped worker may continue its step after another worker has repeated it. The chief
cannot prevent that. So each task carries a token, and servers know which tokens are
valid. The chief invalidates a worker's token before it repeats the worker's step.

A step writes on a server in units. A unit is one call, which begins when all of its
inputs are there, and then needs no other task. It checks the token, checks that this
unit of this step is not written yet, records it, and writes. So a repeated step writes
only missing units. In a loop a step reaches a unit several times, and a repeated step
skips as many times as were written. The last unit of a step records that it is done.

A step may choose by a counter what to write, and other workers may have advanced the
counter before the step is repeated. So the first attempt records the whole numbers that
it has read, and later attempts use them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.strategies.parameter_server import units, variables

# Tokens and marks are used again after so many: far more than there are tasks at
# a time.
_NUM_TOKENS = 1024
_NUM_MARKS = 1024
_COUNT_BITS = 32
_NOWHERE = 2 * _NUM_MARKS
# Of a unit that a step comes to more than once: the step's mark, who came last, how
# often, and how often it is written.
_OF_REPEATED = 4


class Journal:
  """Keeps the tokens of workers, and records of written units on servers."""

  def __init__(self, num_workers: int = 1, num_servers: int = 1):
    self._tokens_of = [
      _make(server, [_NUM_TOKENS], 'tokens') for server in range(num_servers)
    ]
    self._lock = threading.Lock()
    # By token: 0 if it is valid; otherwise an offset outside the records, so that a
    # write with it fails.
    self._state = np.zeros([_NUM_TOKENS], np.int64)
    self._tokens = list(range(num_workers))
    self._next = num_workers
    # Records of the steps that have written a unit, by server, unit and columns. They
    # are separate variables, so that units do not wait for each other.
    self._written: dict[
      tuple[int, int, int | None], variables.ServerVariable
    ] = {}
    self._unit(0, units.LAST_UNIT)

  def token(self, worker: int) -> int:
    """Returns the token for the next task of a worker."""
    return self._tokens[worker]

  def revoke(self, workers: Iterable[int] | None = None) -> None:
    """Makes servers refuse what workers, or all, write with their tokens so far."""
    with self._lock:
      count = len(self._tokens)
      for worker in range(count) if workers is None else workers:
        self._state[self._tokens[worker]] = _NOWHERE
        new = self._next % _NUM_TOKENS
        while new in self._tokens:
          new = (new + 1) % _NUM_TOKENS
        self._next = new + 1
        self._tokens[worker], self._state[new] = new, 0
      for variable in self._tokens_of:
        with _tf_internal.on_task(variable.device, self._state) as [state]:
          tf.raw_ops.AssignVariableOp(resource=variable.handle, value=state)

  def recover(self, restores_all: bool = True) -> None:
    """Prepares for the restore after a server's death.

    Writes that belong to the state before are dropped from now on. An unfinished step
    is repeated with all of its units. If not `restores_all`, units that a living
    server has written are left out.
    """
    for variable in [*self._tokens_of, *self._written.values()]:
      variable.recreate_if_dead()
    self.revoke()
    if not restores_all:
      return
    for (_, unit, _), variable in self._written.items():
      if unit != units.LAST_UNIT:
        zeros = np.zeros(variable.shape, np.int64)
        with _tf_internal.on_task(variable.device, zeros) as [value]:
          tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

  def ticket(
    self, kind: int, token: tf.Tensor, key: tf.Tensor, done: tf.Tensor
  ) -> units.Ticket:
    """Makes, in a worker's graph, the ticket of step `done` of task or split `key`."""
    mark = key * (1 << _COUNT_BITS) + tf.cast(done, tf.int64)
    place = kind * _NUM_MARKS + key % _NUM_MARKS
    return units.Ticket(
      tf.stack([token, place, mark]),
      self._admit,
      lambda numbers: self._remember(token, place, mark, numbers),
      lambda server: variables.server_device(server),
    )

  def _remember(
    self,
    token: tf.Tensor,
    place: tf.Tensor,
    mark: tf.Tensor,
    numbers: tf.Tensor,
  ) -> tf.Tensor:
    """Returns the numbers of the first attempt, or records these, int64 [n]."""
    # A unit of their own, of which the numbers stand behind the mark.
    count = numbers.shape[0]
    noted = self._unit(0, -count, 1 + count)
    with tf.device(noted.device):
      place += _read(self._tokens_of[0], token)
      before = _read(noted, place)
      here = tf.concat([[mark], numbers], 0)
      after = tf.where(tf.equal(before[0], mark), before, here)
      tf.raw_ops.ResourceScatterUpdate(
        resource=noted.handle, indices=place, updates=after
      )
      return after[1:]

  def _admit(
    self, ticket: tf.Tensor, server: int, unit: int, is_repeated: bool
  ) -> tf.Tensor:
    """Returns, on a server, whether a unit is still to be written, and records it.

    Fails if the token is not valid. `is_repeated` says that a step may reach the unit
    more than once.
    """
    token, place, mark = tf.unstack(ticket)
    # As few operations as can be: each step does them on each server.
    place += _read(self._tokens_of[server], token)
    written = self._unit(server, unit, _OF_REPEATED if is_repeated else None)
    before = _read(written, place)  # Fails, if there is no such place.
    if is_repeated:
      after, is_new = _next_time(before, token, mark)
    else:
      after, is_new = mark, tf.not_equal(before, mark)
    tf.raw_ops.ResourceScatterUpdate(
      resource=written.handle, indices=place, updates=after
    )
    return is_new

  def _unit(
    self, server: int, unit: int, columns: int | None = None
  ) -> variables.ServerVariable:
    """Returns the record of a unit: by place the step's mark, and more columns."""
    # Steps have different units of one number.
    key = server, unit, columns
    if key not in self._written:
      of_each = [] if columns is None else [columns]
      with tf.init_scope():
        self._written[key] = _make(
          server, [2 * _NUM_MARKS, *of_each], 'written'
        )
    return self._written[key]

  def done(self, kind: int, key: int) -> int:
    """Returns, on the coordinator, how many steps of task or split `key` are done."""
    place = kind * _NUM_MARKS + key % _NUM_MARKS
    found = 0
    for (_, unit, _), variable in list(self._written.items()):
      with _tf_internal.on_task(variable.device, np.int64(place)) as [at]:
        mark = int(_read(variable, at).numpy().flat[0])
      if mark >> _COUNT_BITS == key:
        step = mark & ((1 << _COUNT_BITS) - 1)
        # Who has begun to write a step had done those before it. That is all that is
        # known where server 0 has died.
        found = max(found, step - (unit != units.LAST_UNIT))
    return found


def _read(variable: variables.ServerVariable, place: tf.Tensor) -> tf.Tensor:
  return tf.raw_ops.ResourceGather(
    resource=variable.handle, indices=place, dtype=tf.int64
  )


def _next_time(
  before: tf.Tensor, token: tf.Tensor, mark: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the new record of a repeated unit, and whether to write the unit."""
  last_mark, last_token, times, written = tf.unstack(before)
  is_same_step = tf.equal(mark, last_mark)
  # Who gives up an attempt at a step takes its token away.
  is_same_attempt = is_same_step & tf.equal(token, last_token)
  times = tf.where(is_same_attempt, times, 0) + 1
  written = tf.where(is_same_step, written, 0)
  noted = tf.stack([mark, token, times, tf.maximum(times, written)])
  return noted, times > written


def _make(server: int, shape: list[int], name: str) -> variables.ServerVariable:
  return variables.ServerVariable(
    server=server,
    initial_value=lambda: tf.zeros(shape, tf.int64),
    trainable=False,
    name=name,
  )
