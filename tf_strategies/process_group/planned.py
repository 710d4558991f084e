"""The collectives of a group, as plans; TCP or MPI moves their bytes."""

from __future__ import annotations

import abc
import functools
import math

import numpy as np

from tf_strategies import errors, option_checks
from tf_strategies.collectives import codec as codec_lib
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.process_group import execution as execution_lib
from tf_strategies.process_group import failure_detection, reductions
from tf_strategies.process_group import group as group_lib
from tf_strategies.process_group import plan as plan_lib
from tf_strategies.process_group import state as state_lib

# When a data link breaks, the control plane most likely knows who died.
_REPORT_SECONDS = 0.3
_MAX_DIMENSIONS = 32
# More than any machine has: what says so is broken.
_MOST_BYTES = 1 << 48


class PlannedGroup(group_lib.ProcessGroup):
  """A group that runs plans; how bytes move is the subclass's.

  Attributes:
    candidates: what 'auto' chooses from for large buffers, the preferred first.
    default_piece_bytes: where `GroupOptions.sub_chunk_bytes` is None.
  """

  candidates: tuple[str, ...]
  default_piece_bytes: int

  def __init__(self, *args):
    super().__init__(*args)
    self._piece_bytes = (
      self._options.sub_chunk_bytes or self.default_piece_bytes
    )
    hosts = [member.address.rpartition(':')[0] for member in self.members]
    self.topology = reductions.topology_of(hosts)
    self._reduction_of = functools.lru_cache(maxsize=1024)(
      functools.partial(
        reductions.reduction,
        world_size=self.world_size,
        rank=self.rank,
        candidates=self.candidates,
        topology=self.topology,
        small_bytes=self._options.small_message_bytes,
        piece_bytes=self._piece_bytes,
      )
    )

  @abc.abstractmethod
  def _move(
    self,
    execution: execution_lib.Execution,
    collective: reductions.Collective,
    operation: state_lib.Operation,
    deadline: float,
  ) -> None:
    """Runs a plan with the other ranks.

    Raises:
      LinkClosedError: a peer is gone, whose bytes are still needed.
      MismatchError: a peer is at another collective.
      DeadlineError: it is late.
    """

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
    """See base class."""
    how = (op, name, algorithm, compression)
    reduction = self._reduction('all_reduce', array, how)
    _check_out('out', out, array, array.dtype)
    _check_out('residual', residual, array, codec_lib.sum_dtype(array.dtype))
    with self._lock:
      if out is None:
        out = self._pool.take(array.shape, array.dtype)
      if self.world_size == 1:
        self._check()
        np.copyto(out, array)
        if residual is not None:
          residual.fill(0)
      else:
        self._reduce(reduction, array, out, residual)
    return out

  def reduce_scatter(
    self,
    array: np.ndarray,
    *,
    op: str = 'sum',
    name: str = '',
    algorithm: str = 'auto',
    compression: str = 'none',
  ) -> np.ndarray:
    """See base class."""
    how = (op, name, algorithm, compression)
    reduction = self._reduction('reduce_scatter', array, how)
    with self._lock:
      if self.world_size == 1:
        self._check()
        return array.copy()
      out = self._pool.take(array.shape, array.dtype)
      self._reduce(reduction, array, out)
    sizes = schedule_lib.chunk_sizes(array.size, self.world_size)
    first = sum(sizes[: self.rank])
    # Aligned as TensorFlow wants it, which would copy it once more otherwise.
    mine = self._pool.take(sizes[self.rank], array.dtype)
    np.copyto(mine, out[first : first + sizes[self.rank]])
    return mine

  def _reduction(
    self, kind: str, array: np.ndarray, how: tuple
  ) -> reductions.Reduction:
    """Checks the arguments; what is not of this array is done once."""
    _check_dtype(array, kind)
    if array.ndim != 1 or not array.flags.c_contiguous:
      raise errors.UnsupportedOptionError(
        f'{kind} of an array of shape {array.shape} and strides '
        f'{array.strides}',
        'one dimension, contiguous',
        'pass np.ascontiguousarray(array).reshape(-1)',
      )
    if not all(isinstance(value, str) for value in how):
      raise errors.UnsupportedOptionError(
        f'{kind} with op, name, algorithm, compression = {how}',
        'strings',
        "write for instance op='sum', name='', algorithm='auto', "
        "compression='none'",
      )
    return self._reduction_of(kind, array.size, array.dtype, *how)

  def _reduce(
    self,
    reduction: reductions.Reduction,
    array: np.ndarray,
    out: np.ndarray,
    residual: np.ndarray | None = None,
  ) -> None:
    collective, plan, form, ufunc = reduction
    self._run(collective, plan, array, out, form, ufunc, residual)

  def all_gather(
    self, array: np.ndarray, *, name: str = ''
  ) -> list[np.ndarray]:
    """See base class."""
    _check_gathered(array, name)
    with self._lock:
      data = np.ascontiguousarray(array).reshape(-1)
      lengths = self._gather_lengths(array, name)
      row_bytes = array.itemsize * math.prod(array.shape[1:])
      sizes = tuple(length * row_bytes for length in lengths)
      what = (name, array.dtype, str(lengths))
      flat = self._gather(data.view(np.uint8), sizes, *what)
    ends = np.cumsum(sizes)
    return [
      flat[end - size : end].view(array.dtype).reshape(n, *array.shape[1:])
      for end, size, n in zip(ends, sizes, lengths, strict=True)
    ]

  def all_gather_equal(
    self, array: np.ndarray, *, name: str = ''
  ) -> np.ndarray:
    """See base class."""
    _check_gathered(array, name)
    with self._lock:
      data = np.ascontiguousarray(array).reshape(-1)
      sizes = (data.nbytes,) * self.world_size
      shape = str(['each', *array.shape])
      flat = self._gather(data.view(np.uint8), sizes, name, array.dtype, shape)
    return flat.view(array.dtype).reshape(-1, *array.shape[1:])

  def _gather_lengths(self, array: np.ndarray, name: str) -> list[int]:
    """The leading dimension of every rank's array."""
    shape = str(['any', *array.shape[1:]])
    mine = np.int64([len(array)]).view(np.uint8)
    sizes = (8,) * self.world_size
    lengths = self._gather(mine, sizes, name, array.dtype, shape).view(np.int64)
    for rank, length in enumerate(lengths.tolist()):
      if not 0 <= length * max(1, array.itemsize) <= _MOST_BYTES:
        self.abort(f'rank {rank} broke the protocol: it gathers {length} rows')
    self._state.check()
    return lengths.tolist()

  def _gather(
    self,
    mine: np.ndarray,
    sizes: tuple[int, ...],
    name: str,
    dtype: np.dtype,
    shape: str,
  ) -> np.ndarray:
    """Brings everyone's bytes to everyone: to all at once, or around the ring.

    A few bytes of many ranks go along a tree, as a sum in which each byte has one term.
    """
    total = sum(sizes)
    out = self._pool.take(total, np.uint8)
    end = sum(sizes[: self.rank + 1])
    own = slice(end - sizes[self.rank], end)
    algorithm = 'gather'
    if self.world_size > plan_lib.FEW_RANKS:
      is_small = total <= self._options.small_message_bytes
      algorithm = 'tree' if is_small else 'ring_gather'
    if algorithm == 'tree':
      plan, terms = self._tree(total), np.zeros(total, np.uint8)
      terms[own] = mine
    else:
      compile_plan = getattr(plan_lib, algorithm)
      plan, terms = compile_plan(self.rank, sizes, self._piece_bytes), mine
    kind = (
      'all_gather',
      name,
      reductions.dtype_text(dtype),
      shape,
      0,
      algorithm,
    )
    self._run(reductions.Collective(*kind), plan, terms, out)
    out[own] = mine
    return out

  def _tree(self, num_bytes: int) -> plan_lib.Plan:
    """A sum of bytes along a tree."""
    ranks = (self.world_size, self.rank)
    return plan_lib.by_name('tree', *ranks, num_bytes, plan_lib.BYTES)

  def broadcast(
    self, array: np.ndarray, root: int, *, name: str = ''
  ) -> np.ndarray:
    """See base class."""
    _check_dtype(array, 'broadcast')
    size, rank = self.world_size, self.rank
    _check_root(root, size)
    _check_name(name)
    with self._lock:
      data = np.ascontiguousarray(array).reshape(-1)
      out = self._pool.take(data.shape, array.dtype)
      how = (size, rank, root, data.nbytes)
      is_small = data.nbytes <= self._options.small_message_bytes
      if is_small and size <= plan_lib.FEW_RANKS:
        algorithm, plan = 'star', plan_lib.star(*how)
      else:
        algorithm = 'chain'
        plan = plan_lib.chain(*how, self._piece_bytes)
      self._run(
        reductions.Collective(
          'broadcast',
          name,
          reductions.dtype_text(array.dtype),
          str(list(array.shape)),
          data.nbytes,
          algorithm,
          root=root,
        ),
        plan,
        data,
        out,
      )
    if rank == root:
      np.copyto(out, data)
    return out.reshape(array.shape)

  def barrier(self, *, name: str = '') -> None:
    """See base class."""
    _check_name(name)
    with self._lock:
      nothing = np.zeros(1, np.uint8)
      algorithm, plan = 'tree', self._tree(1)
      if self.world_size <= plan_lib.FEW_RANKS:
        algorithm = 'gather'
        plan = plan_lib.gather(self.rank, (0,) * self.world_size, 1)
      collective = reductions.Collective('barrier', name, '', '', 0, algorithm)
      self._run(collective, plan, nothing, nothing.copy())

  def _run(
    self,
    collective: reductions.Collective,
    plan: plan_lib.Plan,
    array: np.ndarray,
    out: np.ndarray,
    *how,
  ) -> None:
    """Runs a plan; whatever goes wrong makes the whole group fail."""
    self._check()
    if self.world_size == 1:
      return
    execution = execution_lib.Execution(plan, array, out, self._pool, *how)
    operation = self._state.begin(collective.text, collective.name)
    seconds = self._options.collective_timeout_seconds
    try:
      # After `begin`: a goodbye that comes now sees a collective to end.
      missed = self._state.missed()
      if missed is not None:
        self._control.declare_failed(missed)
      self._state.check()
      self._move(execution, collective, operation, operation.since + seconds)
    except errors.Error:
      raise
    except execution_lib.LinkClosedError as e:
      self._raise_lost(e.rank, e.why)
    except execution_lib.MismatchError as e:
      self._control.report(failure_detection.mismatch(operation, e.rank))
      self._state.check()
    except execution_lib.DeadlineError as e:
      self._control.report(
        failure_detection.timeout(operation, seconds, e.waiting)
      )
      self._state.check()
    except BaseException as e:
      # An interrupt, say: bytes are in the middle of something.
      self.abort(f'{type(e).__name__} during a collective')
      raise
    finally:
      self._state.end()

  def _raise_lost(self, rank: int, why: str) -> None:
    if not self._closed and not self._state.failed.wait(_REPORT_SECONDS):
      self._control.declare_failed(
        self._state.lost(rank, f'died or was disconnected ({why})')
      )
    self._check()


def _check_dtype(array: np.ndarray, what: str) -> None:
  """Refuses what is no array, or one of Python objects."""
  if not isinstance(array, np.ndarray) or array.dtype.hasobject:
    raise errors.UnsupportedOptionError(
      f'{what} of {type(array).__name__}',
      'NumPy arrays of numbers',
      'convert it with np.asarray',
    )


def _check_name(name: str) -> None:
  option_checks.check(
    isinstance(name, str),
    f'name={name!r}',
    'a string',
    "leave it out, or name=''",
  )


def _check_gathered(array: np.ndarray, name: str) -> None:
  """Refuses what `all_gather` cannot take."""
  _check_dtype(array, 'all_gather')
  _check_name(name)
  if not 1 <= array.ndim <= _MAX_DIMENSIONS:
    raise errors.UnsupportedOptionError(
      f'all_gather of an array of shape {array.shape}',
      'one dimension or more',
      'pass array.reshape(1) for a scalar',
    )


def _check_root(root: int, world_size: int) -> None:
  """Refuses a root that is no rank."""
  option_checks.check_int(
    'root',
    root,
    0,
    world_size - 1,
    fix='pass the rank whose values all are to get',
  )


def _check_out(
  name: str, out: np.ndarray | None, array: np.ndarray, dtype: np.dtype
) -> None:
  """Refuses an `out`, or another array to fill, that does not fit the array."""
  if out is None:
    return
  if (
    not isinstance(out, np.ndarray)
    or out.shape != array.shape
    or out.dtype != dtype
    or not out.flags.c_contiguous
    or not out.flags.writeable
    or np.may_share_memory(out, array)
  ):
    raise errors.UnsupportedOptionError(
      f'{name} of {getattr(out, "dtype", type(out))}'
      f'{list(getattr(out, "shape", ()))}',
      f'a writable, contiguous {dtype}{list(array.shape)} that does not '
      'overlap the input',
      'leave it out to get a new array',
    )
