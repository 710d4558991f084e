"""Runs programs that know of no strategy: on one device, and under strategies.

Programs use what stands in their scope; those with a loop of their own ask
`tf.distribute.get_strategy()`, as one device's program may.
"""

import contextlib
import dataclasses
import functools
import os
import pickle
import traceback

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests.conformance import multi_worker
from tests.conformance.multi_worker import WorkerCase
from tests.programs import (
  generative,
  inputs,
  loops,
  models,
  objectives,
  state,
  steps,
  tables,
  training,
)

PROGRAMS = {
  **steps.PROGRAMS,
  **state.PROGRAMS,
  **inputs.PROGRAMS,
  **models.PROGRAMS,
  **generative.PROGRAMS,
  **objectives.PROGRAMS,
  **training.PROGRAMS,
  **tables.PROGRAMS,
  **loops.PROGRAMS,
}
# What is computed with 16 bits, in which sums depend on their order.
_SHORT = ('mixed_float16', 'mixed_bfloat16')

WORKERS = (
  WorkerCase('ring_2x1', 'multi_worker_ring', workers=2, devices=1),
  WorkerCase('collective_2x1', 'multi_worker_collective', 2, devices=1),
  WorkerCase('ring_2x2', 'multi_worker_ring', workers=2, devices=2),
)


def run(name, strategy=None):
  """What a program returns, under a strategy or on one device."""
  keras.backend.clear_session()
  keras.utils.set_random_seed(1)
  with strategy.scope() if strategy else contextlib.nullcontext():
    return PROGRAMS[name]()


@functools.cache
def one_device(name):
  """What a program returns on one device."""
  return run(name)


def limit_of(name) -> float:
  """How far a number may be from one device's, which may be up to 1 or more."""
  return 2e-3 if name in _SHORT else 1e-6


def difference(one, other) -> float:
  """The largest |one - other| / max(1, |one|) in two structures of numbers.

  Lists count as tuples: a strategy that gathers values gives those.
  """
  one, other = tf.nest.flatten(one), tf.nest.flatten(other)
  if len(one) != len(other):
    return float('inf')
  found = 0.0
  for want, got in zip(one, other, strict=True):
    want, got = np.asarray(want), np.asarray(got)
    if want.shape != got.shape:
      return float('inf')
    if want.dtype.kind not in 'biuf':
      found = found if (want == got).all() else float('inf')
      continue
    want, got = want.astype(np.float64), got.astype(np.float64)
    part = np.abs(want - got) / np.maximum(1, np.abs(want))
    # A number that only one of them has (nan) is no small difference.
    part = np.where(np.isnan(want) & np.isnan(got), 0, part)
    found = max(found, np.nan_to_num(part, nan=np.inf).max(initial=0.0))
  return float(found)


@dataclasses.dataclass(frozen=True)
class Failure:
  """What a program raised: its type, and text with a traceback."""

  type: str
  text: str
  is_typed: bool


def outcome(name, strategy=None):
  """What a program returns, or a `Failure`."""
  try:
    return run(name, strategy)
  except Exception as e:
    return Failure(
      type(e).__name__,
      f'{e}\n\n{traceback.format_exc()}',
      isinstance(e, tfs.errors.Error),
    )


def work(rank, case, names, directory):
  """Runs programs on one worker, and writes what each returned.

  It ends with the first that raises: other workers may wait in it.
  """
  strategy = multi_worker.create(case)
  for name in names:
    found = outcome(name, strategy)
    write(directory, rank, name, found)
    if isinstance(found, Failure):
      break
  strategy.close()


def write(directory, rank, name, found):
  """Keeps what a program returned on a worker for `read`."""
  path = os.path.join(directory, f'{rank}.{name}')
  with open(f'{path}.part', 'wb') as f:
    pickle.dump(found, f)
  os.replace(f'{path}.part', path)


def read(directory, rank, name):
  """What a worker wrote of a program, or None."""
  try:
    with open(os.path.join(directory, f'{rank}.{name}'), 'rb') as f:
      return pickle.load(f)
  except FileNotFoundError:
    return None
