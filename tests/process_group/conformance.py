"""The table of a group's reductions: algorithm x size x dtype.

It is built from the registries, so it includes new algorithms. The expected
bits come from the simulator.
"""

import collections
import contextlib
import itertools
import time
from unittest import mock

import numpy as np

from tests.collectives.simulator import simulate
from tf_strategies import errors
from tf_strategies.collectives import cost_model
from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.collectives.schedule import chunk_sizes
from tf_strategies.process_group import group as group_lib
from tf_strategies.process_group import plan, reductions
from tf_strategies.process_group.mpi import group as mpi_group
from tf_strategies.process_group.tcp import link

# Empty, fewer elements than ranks, and chunks of several pieces.
SIZES = (0, 1, 64, 1009)
DTYPES = (
  *('float32', 'float64', 'float16', 'bfloat16'),
  *('int32', 'int64', 'uint8', 'complex64'),
)
_SMALL_BYTES = 256

Case = collections.namedtuple('Case', 'kind algorithm size dtype')


@contextlib.contextmanager
def small_pieces():
  """Makes arrays of a few hundred bytes count as large, and sends them in pieces."""
  with (
    mock.patch.object(plan, 'SMALL_BYTES', _SMALL_BYTES),
    mock.patch.object(link, '_LEAST_IN_MEMORY', 64),
    mock.patch.object(group_lib.ProcessGroup, 'piece_bytes', 192),
    mock.patch.object(mpi_group.MpiProcessGroup, 'piece_bytes', 192),
  ):
    yield


def cases(world_size: int) -> list[Case]:
  """Returns all cases for a number of processes."""
  kinds = {
    'all_reduce': ('auto', *ALGORITHMS),
    'reduce_scatter': (
      'auto',
      *(n for n in ALGORITHMS if half(n, world_size) is not None),
    ),
  }
  found = []
  for kind, names in kinds.items():
    for case in itertools.product(
      names,
      SIZES,
      DTYPES,
    ):
      case = Case(kind, *case)
      # Other dtypes run as a small and as a large array: the effects of dtype and size
      # are independent.
      if case.dtype == 'float32' or case.size in (1, 1009):
        found.append(case)
  return found


def half(algorithm: str, world_size: int):
  """Returns the reduce-scatter half of an algorithm, or None."""
  try:
    return ALGORITHMS[algorithm](world_size).reduce_scatter()
  except errors.ScheduleError:
    return None


def values(rank: int, case: Case) -> np.ndarray:
  """Returns values that differ by rank and position. Float sums depend on order."""
  noise = np.random.RandomState([rank, case.size]).uniform(0, 9, case.size)
  return (noise + rank + np.arange(case.size) % 7).astype(case.dtype)


def run(group) -> dict[Case, list]:
  """Returns the results of a rank in each case, called twice, and the bytes sent."""
  results = {}
  for case in cases(group.world_size):
    array = values(group.rank, case)
    before, sent = array.tobytes(), group.bytes_sent
    how = case._asdict()
    reduce = getattr(group, how.pop('kind'))
    del how['size'], how['dtype']
    outputs = [reduce(array, name=str(case), **how)]
    if case.kind == 'all_reduce':
      how['out'] = np.empty_like(array)
    outputs.append(reduce(array, name=str(case), **how))
    assert array.tobytes() == before
    assert 'out' not in how or outputs[1] is how['out']
    assert outputs[0].ctypes.data % 64 == 0
    assert all(out.dtype == array.dtype for out in outputs)
    sent = group.bytes_sent - sent
    results[case] = [*(out.tobytes() for out in outputs), sent]
  return results


def expected(case: Case, world_size: int, large: str = 'ring') -> list[list]:
  """Returns the result of each rank and the number of bytes sent, from the simulator.

  Args:
    case: a case of the table.
    world_size: number of processes.
    large: the algorithm that 'auto' means for large arrays of other dtypes.
  """
  inputs = [values(rank, case) for rank in range(world_size)]
  if world_size == 1:
    return [[*[inputs[0].tobytes()] * 2, 0]]
  schedule = _schedule(case, world_size, large)
  starts = np.cumsum((0, *chunk_sizes(case.size, world_size)))
  simulation = simulate(schedule, inputs)
  outputs, links = simulation.outputs, simulation.bytes_per_link
  if case.kind == 'reduce_scatter':
    outputs = [
      out[starts[rank] : starts[rank + 1]] for rank, out in enumerate(outputs)
    ]
  # The second call gives the same result.
  return [
    [
      *[out.tobytes()] * 2,
      2 * sum(size for (src, _), size in links.items() if src == rank),
    ]
    for rank, out in enumerate(outputs)
  ]


def check_moves(group) -> None:
  """Checks that arrays of any shape and dtype reach all ranks, bit by bit."""
  ranks = range(group.world_size)
  for shape, dtype in (
    *(((), '>f4'), ((2, 0), 'i4'), ((3, 2), 'f8'), ((500, 2), 'i8')),
  ):
    arrays = [
      (np.arange(np.prod(shape, dtype=int)) + 1000.5 * rank)
      .astype(dtype)
      .reshape(shape)
      for rank in ranks
    ]
    own = arrays[group.rank]
    for root in ranks:
      _assert_same(group.broadcast(own, root), arrays[root])
    if shape:
      gathered = group.all_gather(own, are_equal=True)
      _assert_same(gathered, np.concatenate(arrays))
  for size in (0, 3, 500):
    ragged = [np.full((size * r + (r + 1) % 2, 3), r, np.int16) for r in ranks]
    _assert_same(group.all_gather(ragged[group.rank]), np.concatenate(ragged))


def check_barrier(group) -> None:
  """Checks that no rank leaves a barrier before all ranks have entered it."""
  time.sleep(0.2 * group.rank)
  came = time.monotonic()
  group.barrier()
  left = time.monotonic()
  latest = group.all_gather(np.array([came])).max()
  assert left >= latest, (left, latest)


def _assert_same(got: np.ndarray, want: np.ndarray) -> None:
  assert (got.dtype, got.shape) == (want.dtype, want.shape), (got, want)
  assert got.tobytes() == want.tobytes(), (got, want)


def _schedule(case: Case, world_size: int, large: str):
  algorithm = case.algorithm
  if algorithm == 'auto':
    dtype = np.dtype(case.dtype)
    is_small = case.size * dtype.itemsize <= _SMALL_BYTES
    # 16-bit values are rounded after each addition.
    is_rounded = reductions.sum_dtype(dtype) != dtype
    algorithm = 'direct' if is_rounded else large
    is_whole = case.kind == 'all_reduce'
    if world_size <= plan.FEW_RANKS:
      if is_small:
        algorithm = 'one_shot' if is_whole else 'direct'
    elif not is_rounded:
      algorithm = 'ring'
      if is_whole:
        topology = reductions.topology_of(['host'] * world_size)
        names = ('tree',) if is_small else ('ring', 'tree')
        num_bytes = case.size * dtype.itemsize
        algorithm = cost_model.choose(num_bytes, topology, names).name
  if case.kind == 'reduce_scatter':
    return half(algorithm, world_size)
  return ALGORITHMS[algorithm](world_size)


def assert_results(test, results: list[dict], large: str = 'ring') -> None:
  """Compares the results of all ranks with the simulator, bit by bit."""
  world_size = len(results)
  for case in cases(world_size):
    want = expected(case, world_size, large)
    for rank, result in enumerate(results):
      test.assertEqual(result[case], want[rank], (case, rank))
      if case.kind == 'all_reduce':
        test.assertEqual(result[case][:2], results[0][case][:2], (case, rank))
