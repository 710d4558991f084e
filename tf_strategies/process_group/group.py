"""The interface of process groups, and what the kinds of them share."""

from __future__ import annotations

import abc
import atexit
import collections
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_strategies import errors, option_checks
from tf_strategies.process_group import buffers
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.network import protocol


class ProcessGroup(abc.ABC):
  """Processes that move arrays between each other.

  `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast` and `barrier` are
  collectives: every rank calls them in the same order with matching arguments,
  one at a time. `exchange` and `agree` run beside them, from any thread.

  Once a group has failed, every call raises what it failed with.

  Attributes:
    name: 'tcp' or 'mpi'.
    elastic: whether the processes can form a group again after a failure.
  """

  name: str
  elastic: bool

  def __init__(
    self,
    state: state_lib.GroupState,
    plane: control_plane.ControlPlane | None,
    options: options_lib.GroupOptions,
  ):
    self._state = state
    self._control = plane
    self._options = options
    self._closed = False
    self._lock = threading.RLock()
    self._agreements: collections.Counter[str] = collections.Counter()
    self._agreements_lock = threading.Lock()
    self._pool = buffers.Pool()
    self._pid = os.getpid()
    atexit.register(self._end_with_program)

  @property
  def rank(self) -> int:
    """This process's place in the group."""
    return self._state.rank

  @property
  def members(self) -> tuple[state_lib.Member, ...]:
    """All members of the group by rank."""
    return self._state.members

  @property
  def world_size(self) -> int:
    """Number of processes."""
    return len(self.members)

  @property
  def generation(self) -> int:
    """Counts the groups that formed in this job, from 1."""
    return self._state.generation

  @property
  @abc.abstractmethod
  def bytes_sent(self) -> int:
    """Bytes of arrays that this process has sent so far, without headers."""

  @abc.abstractmethod
  def paths(self) -> dict[int, str]:
    """How this process gets arrays of each rank to which it has a link.

    Returns:
      By rank 'memory', 'socket' or 'mpi', and why not memory, such as
      'socket, not memory: Permission denied'. The first collectives of a group
      find it out.
    """

  @property
  def failure(self) -> errors.Error | None:
    """The error of a failed group; None while it works."""
    report = self._state.failure
    return None if report is None else report.exception()

  @abc.abstractmethod
  def all_reduce(
    self,
    array: np.ndarray,
    *,
    op: str = 'sum',
    out: np.ndarray | None = None,
    name: str = '',
    algorithm: str = 'auto',
    compression: str = 'none',
    residual: np.ndarray | None = None,
  ) -> np.ndarray:
    """Combines the arrays of all ranks; every rank gets the same bits.

    Args:
      array: 1-D, contiguous, of a number's dtype; the same length and dtype on
        all ranks. It is only read.
      op: 'sum', 'min' or 'max'.
      out: where the result goes, of the same length and dtype and apart from
        `array`; None for a new array.
      name: of the tensor, for messages; the same on all ranks.
      algorithm: a name in `collectives.ALGORITHMS`, or 'auto' for the fastest
        by the size of the array and the hosts of the ranks.
      compression: a name in `collectives.CODECS`: what floats travel as. They,
        and 16-bit floats always, are added in float32.
      residual: an array like `out`, in the dtype in which is added; it is filled
        with this rank's share of what the codec has left out of the sum, which
        the caller may add to its next array.

    Returns:
      `out`, or a new array that is aligned to 64 bytes. Each rank sends and
      receives 2 (N - 1) / N of the buffer where it is large.

    Raises:
      UnsupportedOptionError: an argument that cannot work.
      CollectiveMismatchError: the ranks disagree on the arguments.
      WorkerUnavailableError: a rank died, left or went silent.
      CollectiveTimeoutError: a rank did not come in time.
    """

  @abc.abstractmethod
  def reduce_scatter(
    self,
    array: np.ndarray,
    *,
    op: str = 'sum',
    name: str = '',
    algorithm: str = 'auto',
    compression: str = 'none',
  ) -> np.ndarray:
    """Combines the arrays of all ranks; each rank gets one part of the result.

    Arguments and errors are those of `all_reduce`, with an algorithm whose first
    half leaves each rank with one chunk.

    Returns:
      This rank's chunk: that of `collectives.chunk_sizes(len(array),
      world_size)`, in the order of ranks. Each rank sends and receives
      (N - 1) / N of the buffer.
    """

  @abc.abstractmethod
  def all_gather(
    self, array: np.ndarray, *, name: str = ''
  ) -> list[np.ndarray]:
    """Brings every rank's array to every rank; raises as `all_reduce`.

    Args:
      array: of one dimension or more. The first may differ between ranks; the
        others, and the dtype, may not.
      name: for messages; the same on all ranks.

    Returns:
      One array for each rank.
    """

  @abc.abstractmethod
  def all_gather_equal(
    self, array: np.ndarray, *, name: str = ''
  ) -> np.ndarray:
    """Brings arrays of one shape behind each other, in the order of ranks.

    It spares what `all_gather` does to learn lengths. Arguments and errors are
    those of `all_gather`.
    """

  @abc.abstractmethod
  def broadcast(
    self, array: np.ndarray, root: int, *, name: str = ''
  ) -> np.ndarray:
    """Brings one rank's array to every rank; raises as `all_reduce`.

    Args:
      array: of the same shape and dtype on all ranks; read only on the root.
      root: the rank whose values all get.
      name: for messages; the same on all ranks.

    Returns:
      A new array; on the root a copy too.
    """

  @abc.abstractmethod
  def barrier(self, *, name: str = '') -> None:
    """Returns when every rank has called it; raises as `all_reduce`."""

  def exchange(
    self, tag: str, payload: bytes, timeout_seconds: float | None = None
  ) -> list[bytes]:
    """Brings a few bytes of every rank to every rank, beside the collectives.

    May be called from any thread, in any order: calls with the same tag meet.

    Args:
      tag: names the meeting; each rank uses it once until all have their
        answers.
      payload: at most 1 MiB.
      timeout_seconds: None for `collective_timeout_seconds`.

    Returns:
      The payloads by rank.

    Raises:
      CollectiveTimeoutError: names the ranks that did not come. The group
        stays usable.
      Error: the group has failed.
    """
    self._check()
    option_checks.check(
      isinstance(tag, str),
      f'tag={tag!r} of exchange',
      'a string',
      'name the meeting, as all ranks do',
    )
    option_checks.check_type(
      'payload',
      payload,
      (bytes, bytearray, memoryview),
      'bytes',
      "encode a string: payload=text.encode('utf-8')",
    )
    if timeout_seconds is not None:
      option_checks.check_seconds('timeout_seconds', timeout_seconds)
    if len(payload) > protocol.MAX_PAYLOAD_BYTES or not protocol.check_tag(tag):
      raise errors.UnsupportedOptionError(
        f'exchange of {len(payload)} bytes with a tag of {len(tag)} characters',
        f'{protocol.MAX_PAYLOAD_BYTES} bytes with a tag of 128 characters',
        'send arrays with all_gather or broadcast',
      )
    if self.world_size == 1:
      return [bytes(payload)]
    if timeout_seconds is None:
      timeout_seconds = self._options.collective_timeout_seconds
    with self._state.exchanging(tag):
      return self._control.exchange(tag, bytes(payload), timeout_seconds)

  def describe(self) -> dict[str, Any]:
    """Where this rank is; at any time, from any thread.

    Returns:
      `sequence` (the number of its newest collective, from 1; 0 before it),
      `busy` (whether that is running, `seconds` how long), `name` of the
      tensor, `text` for people, `exchanges` (seconds of those that are open, by
      tag), and `call`, the method of a model that the program is in.
    """
    return self._state.describe()

  def pending_joiners(self) -> tuple[int, ...]:
    """Tasks that wait for the group to form again; none if not elastic."""
    if self._control is None or not self.elastic:
      return ()
    return self._control.joiners()

  def abort(self, reason: str) -> None:
    """Makes the group fail on every rank, with this rank and the reason."""
    if self._closed:
      return
    report = self._state.lost(self.rank, f'aborted the group ({reason})')
    if self._control is None:
      self._state.fail(report)
    else:
      self._control.declare_failed(report)

  @property
  def running_call(self) -> Callable[[], str]:
    """Names the method of a model that the program is in, '' for none."""
    return self._state.running_call

  @running_call.setter
  def running_call(self, name_call: Callable[[], str]) -> None:
    self._state.running_call = name_call

  def close(self) -> None:
    """Says goodbye; ranks that still need this one get an error."""
    self._close(has_ended=False)

  def _end_with_program(self) -> None:
    """Tells the other ranks, at exit, that this one has ended."""
    # What was forked is no rank. A program that failed says nothing: its peers look
    # at its log. With MPI it must, since MPI keeps it alive until they have ended.
    has_failed = getattr(sys, 'last_type', None) is not None
    if os.getpid() == self._pid and not (has_failed and self.elastic):
      self._close(has_ended=not has_failed)

  def _close(self, has_ended: bool) -> None:
    atexit.unregister(self._end_with_program)
    if not self._closed:
      self._closed = True
      self._leave(has_ended)

  @abc.abstractmethod
  def _leave(self, has_ended: bool) -> None:
    """Says goodbye, which tells whether the program ends, and frees all."""

  def agree(self, value: Any, *, what: str) -> Any:
    """Checks that all ranks have the same value.

    Args:
      value: anything that JSON can say.
      what: names the value; the nth call with a name on one rank meets the
        nth call with that name on the others.

    Returns:
      The value.

    Raises:
      CollectiveMismatchError: on every rank: what differs, where, and how.
      UnsupportedOptionError: JSON cannot say the value.
      Error: as `exchange`.
    """
    option_checks.check(
      isinstance(what, str), f'what={what!r}', 'a string', 'name the value'
    )
    try:
      text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as e:
      raise errors.UnsupportedOptionError(
        f'{what}={value!r} ({e})',
        'numbers, strings, lists and dictionaries with strings as keys',
        'convert it first',
      ) from e
    with self._agreements_lock:
      self._agreements[what] += 1
      tag = f'agree/{what}/{self._agreements[what]}'
    answers = self.exchange(tag, text.encode())
    texts = [answer.decode('utf-8', 'replace') for answer in answers]
    differing = tuple(r for r, t in enumerate(texts) if t != texts[0])
    if not differing:
      return value
    said = ', '.join(f'{self.members[r]} has {texts[r]}' for r in differing[:4])
    error = errors.CollectiveMismatchError(
      f'The workers disagree on {what}: {self.members[0]} has {texts[0]}, '
      f'{said}{", ..." if len(differing) > 4 else ""}. Start all workers with '
      'the same settings.'
    )
    error.ranks = differing
    raise error

  def _check(self) -> None:
    self._state.check()
    if self._closed:
      raise errors.WorkerUnavailableError(
        'This process has closed its group. Form a new one.'
      )

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()
