"""A process group over TCP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tf_strategies import errors
from tf_strategies.collectives import schedule
from tf_strategies.process_group import checks, failure_detection
from tf_strategies.process_group import combine as combine_lib
from tf_strategies.process_group import group as group_lib
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import plan as plan_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.network import protocol as wire_lib
from tf_strategies.process_group.tcp import transport as transport_lib

# When a data link breaks, the control plane most likely knows who died.
_REPORT_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class _Collective:
  """What all ranks must have in common in one collective."""

  kind: str
  name: str
  dtype: str
  shape: str
  num_bytes: int
  algorithm: str
  op: str = ''
  root: int = 0

  @property
  def text(self) -> str:
    """For messages."""
    how = f'({self.op})' if self.op else ''
    root = f' from rank {self.root}' if self.kind == 'broadcast' else ''
    array = f' of {self.dtype}{self.shape}' if self.dtype else ''
    return f'{self.kind}{how} {self.name!r}{array}{root}'

  def header(self, generation: int, sequence: int) -> wire_lib.DataHeader:
    """As it travels."""
    return wire_lib.DataHeader(
      self.kind,
      generation,
      sequence,
      self.algorithm,
      self.op,
      self.dtype[:15],
      self.num_bytes,
      self.root,
      wire_lib.checksum(f'{self.name} {self.dtype} {self.shape}'),
    )


class TcpProcessGroup(group_lib.ProcessGroup):
  """See the base class; made by `Rendezvous.form`.

  Args:
    state: what the group's threads share.
    transport: the data links.
    control: the control plane.
    options: of the group.
    on_end: called once the group is closed.
  """

  name = 'tcp'
  elastic = True

  def __init__(
    self,
    state: state_lib.GroupState,
    transport: transport_lib.Transport,
    control: control_plane.ControlPlane,
    options: options_lib.GroupOptions,
    on_end: Callable[[], None] = lambda: None,
  ):
    super().__init__(state, control, options)
    self._transport = transport
    self._on_end = on_end
    state.on_failure(transport.shut_down)

  @property
  def bytes_sent(self) -> int:
    """See base class."""
    return self._transport.bytes_sent

  def all_reduce(
    self,
    array: np.ndarray,
    *,
    op: str = 'sum',
    out: np.ndarray | None = None,
    name: str = '',
    wire: str = 'none',
  ) -> np.ndarray:
    """See base class."""
    checks.check_reduced(array, op, wire)
    checks.check_out(out, array)
    with self._lock:
      if out is None:
        out = self._pool.take(array.shape, array.dtype)
      self._all_reduce(array, op, out, name, wire)
    return out

  def _all_reduce(self, array, op, out, name, wire) -> None:
    size, rank, options = self.world_size, self.rank, self._options
    if size == 1:
      self._check()
      np.copyto(out, array)
      return
    small = array.nbytes <= options.small_message_bytes
    algorithm = 'everyone' if small else 'ring' if wire == 'none' else 'owners'
    low = 0
    if small:
      plan = plan_lib.to_everyone(size, rank, array.nbytes)
    else:
      lengths = (array.size, array.itemsize, options.sub_chunk_bytes)
      if wire == 'none':
        plan = plan_lib.by_name('ring', size, rank, *lengths)
      else:
        plan = plan_lib.owners_combine(size, rank, *lengths)
        low = sum(schedule.chunk_sizes(array.size, size)[:rank])
    views, combine = [array, out], None
    if plan.stage_bytes:
      stage = self._pool.take(plan.stage_bytes // array.itemsize, array.dtype)
      views.append(stage)
      rows = stage.reshape(size, -1)
      combine = combine_lib.combiner(
        array, rows, out, rank, low, checks.UFUNCS[op], wire
      )
    collective = _Collective(
      'all_reduce',
      name,
      checks.dtype_text(array.dtype),
      str([array.size]),
      array.nbytes,
      algorithm,
      op if wire == 'none' else f'{op} {wire}',
    )
    self._run(collective, plan, views, checks.UFUNCS[op], combine)

  def all_gather(
    self, array: np.ndarray, *, name: str = ''
  ) -> list[np.ndarray]:
    """See base class."""
    checks.check_gathered(array)
    with self._lock:
      sizes = self._gather_lengths(array, name)
      shapes = [(length, *array.shape[1:]) for length in sizes]
      row_bytes = checks.row_bytes(array)
      byte_sizes = tuple(length * row_bytes for length in sizes)
      flat = self._pool.take(sum(byte_sizes), np.uint8)
      plan = plan_lib.gather(
        self.rank, byte_sizes, self._options.sub_chunk_bytes
      )
      data = np.ascontiguousarray(array).reshape(-1)
      if self.world_size > 1:
        self._run(
          _Collective(
            'all_gather',
            name,
            checks.dtype_text(array.dtype),
            str(sizes),
            0,
            'gather',
          ),
          plan,
          [data, flat],
        )
      else:
        self._check()
    ends = np.cumsum(byte_sizes)
    own = ends[self.rank] - byte_sizes[self.rank]
    flat[own : ends[self.rank]] = data.view(np.uint8)
    return [
      flat[end - size : end].view(array.dtype).reshape(shape)
      for end, size, shape in zip(ends, byte_sizes, shapes, strict=True)
    ]

  def _gather_lengths(self, array: np.ndarray, name: str) -> list[int]:
    """The leading dimension of every rank's array."""
    size = self.world_size
    if size == 1:
      return [len(array)]
    lengths = np.zeros(size, np.int64)
    mine = np.int64([len(array)])
    self._run(
      _Collective(
        'all_gather',
        name,
        checks.dtype_text(array.dtype),
        str(['any', *array.shape[1:]]),
        0,
        'lengths',
      ),
      plan_lib.gather(self.rank, (8,) * size, 64),
      [mine, lengths],
    )
    lengths[self.rank] = len(array)
    return lengths.tolist()

  def broadcast(
    self, array: np.ndarray, root: int, *, name: str = ''
  ) -> np.ndarray:
    """See base class."""
    checks.check_dtype(array, 'broadcast')
    size, rank = self.world_size, self.rank
    checks.check_root(root, size)
    with self._lock:
      data = np.ascontiguousarray(array).reshape(-1)
      out = self._pool.take(data.shape, array.dtype)
      if size == 1:
        self._check()
      else:
        small = data.nbytes <= self._options.small_message_bytes
        if small:
          plan = plan_lib.star(size, rank, root, data.nbytes)
        else:
          plan = plan_lib.chain(
            size, rank, root, data.nbytes, self._options.sub_chunk_bytes
          )
        self._run(
          _Collective(
            'broadcast',
            name,
            checks.dtype_text(array.dtype),
            str(list(array.shape)),
            data.nbytes,
            'star' if small else 'chain',
            root=root,
          ),
          plan,
          [data, out],
        )
    if rank == root:
      np.copyto(out, data)
    return out.reshape(array.shape)

  def barrier(self, *, name: str = '') -> None:
    """See base class."""
    with self._lock:
      if self.world_size == 1:
        self._check()
        return
      self._run(
        _Collective('barrier', name, '', '', 0, 'everyone'),
        plan_lib.to_everyone(self.world_size, self.rank, 0),
        [],
      )

  def close(self) -> None:
    """See base class."""
    if self._closed:
      return
    self._closed = True
    self._control.close()
    # Wakes a collective in another thread, which gives the lock back.
    self._transport.shut_down()
    with self._lock:
      self._transport.close()
    self._on_end()

  def _run(
    self,
    collective: _Collective,
    plan: plan_lib.Plan,
    views: Sequence[np.ndarray],
    ufunc: np.ufunc | None = None,
    combine: combine_lib.Combine | None = None,
  ) -> None:
    """Runs a plan; whatever goes wrong makes the whole group fail."""
    self._check()
    operation = self._state.begin(collective.text, collective.name)
    seconds = self._options.collective_timeout_seconds
    try:
      # After `begin`: a goodbye that comes now sees a collective to end.
      for rank, last in list(self._state.departed.items()):
        # What it sent before it left is on its way.
        if last < operation.sequence:
          self._state.fail(self._state.left(rank))
      self._state.check()
      header = collective.header(self.generation, operation.sequence)
      self._transport.run(
        plan, header, views, ufunc, combine, operation.since + seconds
      )
    except errors.Error:
      raise
    except transport_lib.LinkClosedError as e:
      self._raise_lost(e.rank)
    except transport_lib.HeaderMismatchError as e:
      received = _text_of(e.received)
      self._control.report(
        failure_detection.mismatch(operation, e.rank, received)
      )
      self._state.check()
    except transport_lib.DeadlineError as e:
      self._control.report(
        failure_detection.timeout(operation, seconds, e.waiting)
      )
      self._state.check()
    except BaseException as e:
      # An interrupt, say: the links are in the middle of something.
      self.abort(f'{type(e).__name__} during a collective')
      raise
    finally:
      self._state.end()

  def _raise_lost(self, rank: int) -> None:
    if not self._closed and not self._state.failed.wait(_REPORT_SECONDS):
      self._control.declare_failed(
        self._state.lost(
          rank, 'died or was disconnected (its data link is closed)'
        )
      )
    self._check()


def _text_of(received: wire_lib.DataHeader | None) -> str:
  if received is None:
    return 'something else'
  return (
    f'{received.kind}({received.op}) of {received.num_bytes} bytes of '
    f'{received.dtype}, sequence {received.sequence} of generation '
    f'{received.generation}'
  )
