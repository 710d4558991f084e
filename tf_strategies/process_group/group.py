"""Defines process groups. Their collectives are plans, whose bytes move over TCP.

`mpi.group` moves the bytes over MPI.
"""

import atexit
import concurrent.futures
import functools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tf_strategies import errors, option_checks
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.process_group import buffers, reductions
from tf_strategies.process_group import execution as execution_lib
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import plan as plan_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.network import protocol
from tf_strategies.process_group.tcp import link as link_lib
from tf_strategies.process_group.tcp import transport as transport_lib

# When a data link breaks, the control plane soon knows the rank that died.
_REPORT_SECONDS = 0.3
# Between two looks at the group while a link is being made.
_CHECK_SECONDS = 0.05


class ProcessGroup:
  """Processes that move arrays between each other; made by `Rendezvous.form`.

  `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast` and `barrier` are
  collectives: every rank calls them in the same order with matching arguments,
  one at a time. `exchange` runs beside them, from any thread.

  Once a group has failed, every call raises the error of that failure.

  Attributes:
    name: 'tcp' or 'mpi'.
    elastic: whether the processes can form a group again after a failure.
    candidates: algorithms that 'auto' may choose for large buffers, best first.
    piece_bytes: largest number of bytes in one piece. Additions overlap with the
      transfer of the next pieces.
    rank: rank of this process in the group.
    members: members of the group by rank.
    world_size: number of processes.
    generation: number of the group; counts the groups that formed in this job, from 1.
    bytes_sent: bytes of arrays that this process has sent so far, without headers.
  """

  name = 'tcp'
  elastic = True
  candidates: tuple[str, ...] = ('ring', 'direct')
  piece_bytes = 1 << 19

  def __init__(
    self,
    state: state_lib.GroupState,
    transport: transport_lib.Transport,
    plane: control_plane.ControlPlane,
    options: options_lib.GroupOptions,
    connect: Callable[[Iterable[int]], concurrent.futures.Future],
  ):
    self.rank, self.members = state.rank, state.members
    self.world_size = len(state.members)
    self.generation = state.generation
    self.bytes_sent = 0
    self._state = state
    self._transport = transport
    self._control = plane
    self._options = options
    self._connect = connect
    self._lock = threading.RLock()
    self._pool = buffers.Pool()
    self._pid = os.getpid()
    hosts = [member.address.rpartition(':')[0] for member in self.members]
    self._reduction_of = functools.lru_cache(maxsize=1024)(
      functools.partial(
        reductions.reduction,
        rank=self.rank,
        candidates=self.candidates,
        topology=reductions.topology_of(hosts),
        piece_bytes=self.piece_bytes,
      )
    )
    state.on_failure(transport.shut_down)
    atexit.register(self._end_with_program)

  def paths(self) -> dict[int, str]:
    """Returns the way in which arrays arrive from each rank with a link.

    Returns:
      A dict of rank to 'memory', 'socket' or 'mpi', with the reason against memory,
      such as 'socket, not memory: Permission denied'. It is known after the first
      collectives of a group.
    """
    return self._transport.paths()

  @property
  def failure(self) -> errors.Error | None:
    """The error of a group that has failed or is closed; None while it works."""
    report = self._state.failure
    return None if report is None else report.exception()

  def all_reduce(
    self,
    array: np.ndarray,
    *,
    out: np.ndarray | None = None,
    name: str = '',
    algorithm: str = 'auto',
  ) -> np.ndarray:
    """Adds up the arrays of all ranks; every rank gets the same bits.

    Args:
      array: a one-dimensional, contiguous array of numbers, with the same length and
        dtype on all ranks. It is only read. 16-bit floats are added in float32.
      out: array for the result, with the same length and dtype and its own memory;
        None for a new array.
      name: name of the tensor, for messages; the same on all ranks.
      algorithm: a name in `collectives.ALGORITHMS`, or 'auto' for the fastest
        by the size of the array and the hosts of the ranks.

    Returns:
      `out`, or a new array that is aligned to 64 bytes. Each rank sends and
      receives 2 (N - 1) / N of the buffer where it is large.

    Raises:
      UnsupportedOptionError: an argument that cannot work.
      CollectiveMismatchError: the ranks disagree on the arguments.
      WorkerUnavailableError: a rank died, left or went silent.
      CollectiveTimeoutError: a rank did not come in time.
    """
    reduction = self._reduction_of(
      'all_reduce', array.size, array.dtype, algorithm
    )
    with self._lock:
      if out is None:
        out = self._pool.take(array.shape, array.dtype)
      self._run(*reduction, name, array, out)
    return out

  def reduce_scatter(
    self,
    array: np.ndarray,
    *,
    name: str = '',
    algorithm: str = 'auto',
  ) -> np.ndarray:
    """Adds up the arrays of all ranks; each rank gets one part of the result.

    Arguments and errors are those of `all_reduce`, with an algorithm whose first
    half leaves each rank with one chunk.

    Returns:
      This rank's chunk; `collectives.chunk_sizes(len(array), world_size)` gives the
      sizes in the order of ranks. Each rank sends and receives (N - 1) / N of the
      buffer.
    """
    reduction = self._reduction_of(
      'reduce_scatter', array.size, array.dtype, algorithm
    )
    with self._lock:
      out = self._pool.take(array.shape, array.dtype)
      self._run(*reduction, name, array, out)
    sizes = schedule_lib.chunk_sizes(array.size, self.world_size)
    first = sum(sizes[: self.rank])
    # Aligned, since TensorFlow would copy it once more otherwise.
    mine = self._pool.take(sizes[self.rank], array.dtype)
    np.copyto(mine, out[first : first + sizes[self.rank]])
    return mine

  def all_gather(
    self, array: np.ndarray, *, name: str = '', are_equal: bool = False
  ) -> np.ndarray:
    """Concatenates the arrays of all ranks, in the order of ranks.

    It raises as `all_reduce`.

    Args:
      array: an array with at least one dimension. Only the first dimension may differ
        between ranks.
      name: name for messages; the same on all ranks.
      are_equal: whether all arrays have one shape. Ranks then tell no lengths.

    Returns:
      A new array.
    """
    with self._lock:
      lengths = [len(array)] * self.world_size
      if not are_equal:
        mine = np.int64([len(array)])
        lengths = self.all_gather(mine, name=name, are_equal=True).tolist()
      row_bytes = array.itemsize * math.prod(array.shape[1:])
      sizes = tuple(length * row_bytes for length in lengths)
      shape = [len(array) if are_equal else lengths, *array.shape[1:]]
      text = f'all_gather {{!r}} of {reductions.dtype_text(array.dtype)}{shape}'
      flat = self._gather(text, name, array, sizes)
    # Rows may have no elements.
    return flat.view(array.dtype).reshape(sum(lengths), *array.shape[1:])

  def broadcast(
    self, array: np.ndarray, root: int, *, name: str = ''
  ) -> np.ndarray:
    """Brings one rank's array to every rank; raises as `all_reduce`.

    Args:
      array: an array of the same shape and dtype on all ranks; only the root's values
        are read.
      root: rank whose values all ranks get.
      name: name for messages; the same on all ranks.

    Returns:
      A new array, also on the root.
    """
    sizes = [0] * self.world_size
    sizes[root] = array.nbytes
    what = f'{reductions.dtype_text(array.dtype)}{list(array.shape)}'
    text = f'broadcast {{!r}} of {what} from rank {root}'
    mine = array if self.rank == root else np.empty(0, np.uint8)
    with self._lock:
      # Each link carries the array once, and its pieces overlap.
      flat = self._gather(text, name, mine, tuple(sizes), 'ring')
    return flat.view(array.dtype).reshape(array.shape)

  def barrier(self, *, name: str = '') -> None:
    """Returns when every rank has called it; raises as `all_reduce`."""
    with self._lock:
      sizes = (1,) * self.world_size
      self._gather('barrier {!r}', name, np.zeros(1, np.uint8), sizes)

  def exchange(self, tag: str, value: Any) -> list[Any]:
    """Brings a small value of every rank to every rank, beside the collectives.

    May be called from any thread, in any order: calls with the same tag meet.

    Args:
      tag: name of the meeting. Each rank uses it once until it has the answers.
      value: a value of JSON, which may hold NumPy's numbers, of at most 1 MiB.

    Returns:
      The values by rank.

    Raises:
      CollectiveTimeoutError: names the ranks that did not come in time.
      Error: the group has failed.
    """
    self._state.check()
    text = json.dumps(value, default=option_checks.plain)
    option_checks.check(
      len(text) <= protocol.MAX_PAYLOAD_BYTES,
      f'{len(text)} bytes',
      f'at most {protocol.MAX_PAYLOAD_BYTES} bytes in an exchange',
      'send arrays with all_gather or broadcast',
    )
    seconds = self._options.collective_timeout_seconds
    return list(map(json.loads, self._control.exchange(tag, text, seconds)))

  def describe(self) -> dict[str, Any]:
    """Returns the position of this rank. Any thread may call it at any time.

    Returns:
      `sequence` (number of its newest collective, from 1; 0 before the first),
      `busy` (whether that collective is running), `name` of its tensor, `exchanges`
      (tags of the open exchanges), `call` (the method of a model that the program
      runs) and `recent` (texts of the last collectives).
    """
    return self._state.describe()

  def pending_joiners(self) -> tuple[int, ...]:
    """Returns the tasks that wait for the group to form again; none if not elastic."""
    return self._control.joiners()

  def abort(self, reason: str) -> None:
    """Makes the group fail on every rank, with this rank and the reason."""
    report = self._state.lost(self.rank, f'aborted the group ({reason})')
    self._control.declare_failed(report)

  def name_calls_by(self, running_call: Callable[[], str]) -> None:
    """Asks a function for the method of a model that the program is in; '' for none."""
    self._state.running_call = running_call

  def close(self, has_ended: bool = False) -> None:
    """Says goodbye; ranks that still need this one get an error.

    Args:
      has_ended: whether the program of this rank ends.
    """
    atexit.unregister(self._end_with_program)
    self._control.close(has_ended)
    if self._state.failure is None and self._lock.acquire(blocking=False):
      try:
        self._transport.finish()
      finally:
        self._lock.release()
    # Wakes a collective in another thread, which gives the lock back.
    self._state.fail(state_lib.CLOSED)
    with self._lock:
      self._transport.close()

  def _end_with_program(self) -> None:
    """Tells the other ranks, at exit, that this one has ended."""
    # A forked child is no rank. A program that failed says nothing: its peers look at
    # its log. With MPI it says goodbye, since MPI keeps it alive until they have ended.
    has_failed = getattr(sys, 'last_type', None) is not None
    if os.getpid() == self._pid and not (has_failed and self.elastic):
      self.close(has_ended=not has_failed)

  def _gather(
    self,
    text: str,
    name: str,
    array: np.ndarray,
    sizes: tuple[int, ...],
    way: str = 'direct',
  ) -> np.ndarray:
    """Brings the bytes of all ranks to all.

    Args:
      text: description of the collective; see `_run`.
      name: name of the array.
      array: this rank's array.
      sizes: number of bytes of each rank.
      way: see `plan.gather`. If ranks are many, few bytes take the fewest rounds, and
        many bytes go around the ring.
    """
    total = sum(sizes)
    if self.world_size > plan_lib.FEW_RANKS:
      way = 'doubling' if total <= plan_lib.SMALL_BYTES else 'ring'
    out = self._pool.take(total, np.uint8)
    end = sum(sizes[: self.rank + 1])
    own = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    out[end - own.size : end] = own
    plan = plan_lib.gather(self.rank, sizes, self.piece_bytes, way)
    self._run(text, plan, name, out, out)
    return out

  def _run(
    self,
    text: str,
    plan: plan_lib.RankPlan,
    name: str,
    array: np.ndarray,
    out: np.ndarray,
  ) -> None:
    """Runs a plan; whatever goes wrong makes the whole group fail.

    `text` describes the collective, with `{!r}` for the name of the tensor. All ranks must
    have the same one.
    """
    self._state.check()
    if self.world_size == 1:
      np.copyto(out, array)
      return
    text = text.format(name)
    execution = execution_lib.Execution(plan, array, out, self._pool)
    operation = self._state.begin(text, name)
    seconds = self._options.collective_timeout_seconds
    try:
      # After `begin`: a goodbye that comes now sees a collective to end.
      missed = self._state.missed()
      if missed is not None:
        self._control.declare_failed(missed)
      self._state.check()
      header = link_lib.Header(operation.sequence, reductions.digest(text))
      self._move(execution, header, time.monotonic() + seconds)
      self.bytes_sent += plan.bytes_sent
    except errors.Error:
      raise
    except execution_lib.LinkClosedError as e:
      if not self._state.failed.wait(_REPORT_SECONDS):
        self._control.declare_failed(
          self._state.lost(e.rank, f'died or was disconnected ({e.why})')
        )
      self._state.check()
    except execution_lib.MismatchError as e:
      self._control.suspect([e.rank])
    except execution_lib.DeadlineError as e:
      self._control.suspect(e.waiting, seconds)
    except BaseException as e:
      # An interrupt, say: bytes are in the middle of something.
      self.abort(f'{type(e).__name__} during a collective')
      raise
    finally:
      self._state.end()

  def _move(
    self,
    execution: execution_lib.Execution,
    header: link_lib.Header,
    deadline: float,
  ) -> None:
    """Runs a plan with the other ranks.

    Raises:
      LinkClosedError: a peer is gone, whose bytes are still needed.
      MismatchError: a peer is at another collective.
      DeadlineError: the deadline has passed.
    """
    plan = execution.plan
    missing = self._transport.missing({*plan.sends, *plan.receives})
    if missing:
      self._make_links(missing, deadline)
    self._transport.run(execution, header, deadline, self._state.departed)

  def _make_links(self, ranks: set[int], deadline: float) -> None:
    future = self._connect(ranks)
    try:
      while not concurrent.futures.wait([future], _CHECK_SECONDS).done:
        self._state.check()
        if time.monotonic() >= deadline:
          raise execution_lib.DeadlineError(sorted(ranks))
      future.result()
    finally:
      future.cancel()
    # A group that has ended meanwhile has not taken them.
    self._state.check()
    for rank in self._transport.missing(ranks):
      raise execution_lib.LinkClosedError(rank)

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()
