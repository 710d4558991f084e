"""Times several functions beside each other, fairly.

A machine speeds up, slows down and is shared. Peers that are timed one after
the other see different machines, so here they take turns.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spread:
  """Median and spread of some durations, in milliseconds.

  Attributes:
    median_ms: half of the samples took longer.
    p10_ms: a tenth of the samples was at least as fast.
    p90_ms: a tenth of the samples was at least as slow.
    num_samples: how many there were.
  """

  median_ms: float
  p10_ms: float
  p90_ms: float
  num_samples: int

  @classmethod
  def of(cls, seconds: Sequence[float]) -> 'Spread':
    """Returns the spread of durations in seconds.

    Example:

      >>> Spread.of([0.001, 0.002, 0.003]).median_ms
      2.0

    Args:
      seconds: one or more durations.
    """
    p10, median, p90 = np.percentile(np.asarray(seconds) * 1e3, [10, 50, 90])
    return cls(float(median), float(p10), float(p90), len(seconds))


def turns(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
  """Yields all names in an order of its own for each round.

  What one leaves in the caches and the allocator slows down or speeds up the
  next one, and should not always hit the same. The orders are the same in every
  run.

  Example:

    >>> [''.join(order) for order in turns('abc', 3)]
    ['bca', 'acb', 'acb']

  Args:
    names: who takes turns.
    rounds: how often each has its turn.
  """
  names = list(names)
  for turn in range(rounds):
    yield random.Random(turn).sample(names, len(names))


def take_turns(
  functions: Mapping[str, Callable[[], object]],
  rounds: int,
  repeats: int,
  warmup: int = 1,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
  """Returns the durations of each function's calls, in seconds.

  In each round every function runs `repeats` times, in the order of `turns`.

  Example:

    >>> seconds = take_turns({'a': list, 'b': dict}, rounds=3, repeats=2)
    >>> len(seconds['a']), len(seconds['b'])
    (6, 6)

  Args:
    functions: what to call, by name. A call returns when its work is done.
    rounds: how often each function has its turn.
    repeats: timed calls in a turn.
    warmup: calls before the timed ones of each turn, which bring a function's
      memory back into the caches and the allocator.
    clock: tells the time in seconds.
  """
  seconds = {name: [] for name in functions}
  for order in turns(functions, rounds):
    for name in order:
      call = functions[name]
      for _ in range(warmup):
        call()
      for _ in range(repeats):
        start = clock()
        result = call()
        seconds[name].append(clock() - start)
        # Freed outside of the timed span, and before the next call allocates.
        del result
  return seconds


def in_a_process(function: Callable, *args):
  """Returns the result of a function in a new process with its own devices."""
  with concurrent.futures.ProcessPoolExecutor(
    1, mp_context=multiprocessing.get_context('spawn')
  ) as process:
    return process.submit(function, *args).result()


def split_device(device: str, count: int, gigabytes: float = 16.0) -> list[str]:
  """Names of `count` devices of this process, which has done nothing yet.

  Args:
    device: 'cpu' or 'gpu'.
    count: how many; GPUs that are not there are parts of the first one.
    gigabytes: of memory of each part of a GPU.

  Raises:
    RuntimeError: there is no such device.
  """
  # TensorFlow is imported late: it reads its environment then.
  import tensorflow as tf

  kind = device.upper()
  physical = tf.config.list_physical_devices(kind)
  if not physical:
    raise RuntimeError(f'Expected a {kind} for device={device!r}, got none.')
  if kind == 'CPU':
    options = {}
  elif len(physical) >= count:
    for each in physical:
      tf.config.experimental.set_memory_growth(each, True)
    return [f'GPU:{i}' for i in range(count)]
  else:
    options = {'memory_limit': int(gigabytes * 1024)}
  tf.config.set_logical_device_configuration(
    physical[0],
    [tf.config.LogicalDeviceConfiguration(**options) for _ in range(count)],
  )
  return [f'{kind}:{i}' for i in range(count)]
