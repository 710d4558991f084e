"""Compares the run times of several functions fairly.

The speed of a machine changes, and other programs use it. So functions take turns
instead of running one after the other.
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
    median_ms: median.
    p10_ms: 10th percentile.
    p90_ms: 90th percentile.
    num_samples: number of samples.
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
  """Yields all names in a random order for each round.

  A function changes the caches and the allocator, which affects the next one. Random
  orders spread this over all functions. The orders are the same in every run.

  Example:

    >>> [''.join(order) for order in turns('abc', 3)]
    ['bca', 'acb', 'acb']

  Args:
    names: names of the functions.
    rounds: number of turns of each.
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

  In each round, every function runs `repeats` times, in the order of `turns`.

  Example:

    >>> seconds = take_turns({'a': list, 'b': dict}, rounds=3, repeats=2)
    >>> len(seconds['a']), len(seconds['b'])
    (6, 6)

  Args:
    functions: functions by name. A call must return when its work is done.
    rounds: number of turns of each function.
    repeats: number of timed calls in a turn.
    warmup: number of untimed calls at the start of each turn. They bring a
      function's memory back into the caches and the allocator.
    clock: returns the time in seconds.
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
        # Frees memory outside of the timed span and before the next call.
        del result
  return seconds


def in_a_process(function: Callable, *args):
  """Returns the result of a function in a new process with its own devices."""
  with concurrent.futures.ProcessPoolExecutor(
    1, mp_context=multiprocessing.get_context('spawn')
  ) as process:
    return process.submit(function, *args).result()


def split_device(device: str, count: int, gigabytes: float = 16.0) -> list[str]:
  """Creates `count` logical devices, and returns their names.

  Must be called before this process uses TensorFlow.

  Args:
    device: 'cpu' or 'gpu'.
    count: number of devices. If there are fewer GPUs, the first one is split.
    gigabytes: memory of each part of a GPU.

  Raises:
    RuntimeError: if there is no such device.
  """
  # Imported late, because TensorFlow reads its environment during import.
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
