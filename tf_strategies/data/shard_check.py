"""Proves that input pipelines shard the data: each example is in exactly one."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import errors, option_checks

_SHOWN = 3


def check_shards(
  shards: Sequence[tf.data.Dataset],
  whole: tf.data.Dataset,
  element_id: Callable[[Any], Any] | None = None,
) -> tuple[int, ...]:
  """Checks that pipelines are disjoint and together have all examples.

  Reads an epoch of each pipeline in turn, so it is for tests, and for a look
  before a long run. All pipelines must be made as their workers make them: with
  the options of the run, the same `seed`, no `repeat`, no `drop_remainder`, and
  an `input_context` each.

  Example:

    >>> whole = tf.data.Dataset.range(10).batch(4)
    >>> even, odd = whole.unbatch().shard(2, 0), whole.unbatch().shard(2, 1)
    >>> check_shards([even.batch(4), odd.batch(4)], whole)
    (5, 5)
    >>> check_shards([even.batch(4)] * 2, whole)
    Traceback (most recent call last):
      ...
    tf_strategies.errors.DataError: Expected each example in exactly one of 2 input pipelines, got 5 examples too often (0 in pipelines [0, 1], 2 in pipelines [0, 1], 4 in pipelines [0, 1], ...), 5 in no pipeline (1, 3, 5, ...). Fix: use the same seed and files in all pipelines, and another input_pipeline_id in each

  Args:
    shards: the data set of each input pipeline, of batches.
    whole: the data that they share, such as the data set that is made without
      an `input_context`. An example that is in it twice belongs into two
      shards, or into one of them twice.
    element_id: called with a batch as NumPy arrays, returns what tells its
      examples apart, one value a row, such as `lambda batch: batch['key']`.
      Without it examples are told apart by their bytes, which must then be the
      same each time they are read: no augmentation.

  Returns:
    The number of examples in each shard. O(examples) time and memory.

  Raises:
    DataError: an example is missing, or comes too often; the message names some
      and the pipelines that they are in.
    UnsupportedOptionError: a data set without an end.
  """
  option_checks.check(
    isinstance(shards, Sequence) and shards,
    f'shards={shards!r}',
    'a list of at least one data set',
    'pass one for each input pipeline',
  )
  for name, dataset in (*(('shards', s) for s in shards), ('whole', whole)):
    option_checks.check_type(
      name,
      dataset,
      tf.data.Dataset,
      'a tf.data.Dataset',
      'pass what make_dataset returns',
    )
  option_checks.check_function('element_id', element_id, or_none=True)
  expected = collections.Counter(_ids(whole, element_id))
  found = [collections.Counter(_ids(shard, element_id)) for shard in shards]
  total = sum(found, collections.Counter())
  problems = []
  if extra := total - expected:
    where = [
      f'{key} in pipelines {[i for i, ids in enumerate(found) if key in ids]}'
      for key in list(extra)[:_SHOWN]
    ]
    problems.append(
      f'{extra.total()} examples too often ({_some(where, extra)})'
    )
  if missing := expected - total:
    names = [str(key) for key in list(missing)[:_SHOWN]]
    problems.append(
      f'{missing.total()} in no pipeline ({_some(names, missing)})'
    )
  if problems:
    raise errors.DataError(
      f'Expected each example in exactly one of {len(shards)} input pipelines, '
      f'got {", ".join(problems)}. Fix: use the same seed and files in all '
      'pipelines, and another input_pipeline_id in each'
    )
  return tuple(ids.total() for ids in found)


def _ids(dataset, element_id) -> Iterator[Any]:
  """What tells the examples of one epoch apart, example by example."""
  if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
    raise errors.UnsupportedOptionError(
      'a data set that repeats for ever',
      'data sets of one epoch',
      'make them with repeat=False',
    )
  for batch in dataset.as_numpy_iterator():
    if element_id is not None:
      yield from np.asarray(element_id(batch)).tolist()
      continue
    columns = tf.nest.flatten(batch)
    if len(columns) == 1 and columns[0].ndim == 1:
      yield from columns[0].tolist()
      continue
    for row in zip(*columns, strict=True):
      yield _digest(row)


def _digest(row) -> str:
  digest = hashlib.sha256()
  for value in row:
    array = np.asarray(value)
    # An array of strings holds addresses.
    content = repr(array.tolist()) if array.dtype == object else array.tobytes()
    digest.update(content.encode() if isinstance(content, str) else content)
  return digest.hexdigest()[:16]


def _some(shown: list[str], counter) -> str:
  return ', '.join(shown + ['...'] * (len(counter) > len(shown)))
