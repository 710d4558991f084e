"""Reads examples, in the order of a pass, from each kind of source.

The order of a pass over the data is a function of (seed, number of the pass)
alone. A reader yields the examples of a pass in short, as indices or records, and
`decode` makes a batch of them whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_strategies.data import arrays as arrays_lib
from tf_strategies.data import files as files_lib
from tf_strategies.data import plan as plan_lib
from tf_strategies.data import shuffle

_MAX_OPEN_FILES = 16
# Records that training takes from one file before the next: one at a time costs a
# third of the throughput.
_BLOCK_LENGTH = 16
# Examples that one call prepares where the result is kept.
_PREPARE_BATCH = 256


def call(function: Callable[..., Any] | None, batch: Any, *more: Any) -> Any:
  """Calls a user's function, if there is one, with a batch's components."""
  if function is None:
    return batch
  components = batch if isinstance(batch, tuple) else (batch,)
  return function(*components, *more)


class ArrayReader:
  """Shuffles indices, then gathers a whole batch in one call.

  A shuffle by tf.data takes a step for each element, and fills its buffer before
  the first batch. So one op draws the whole order.
  """

  def __init__(
    self,
    source: arrays_lib.Arrays,
    plan: plan_lib.PipelinePlan,
    prepare_fn: Callable[..., Any] | None,
  ):
    self.num_examples = source.num_examples
    self.plan = plan
    self._decode_fn = source.decode_fn
    self._prepare_fn = prepare_fn
    # A dataset may be made inside a tf.function (a parameter server's workers
    # do) or a device scope: there a constant would become part of the graph,
    # or go to an accelerator and back for each batch.
    with tf.init_scope(), tf.device('/CPU:0'):
      self._examples = tf.nest.map_structure(tf.constant, source.components)
      if prepare_fn and plan.options.cache == 'memory':
        rows = tf.data.Dataset.from_tensor_slices(self._examples)
        parts = rows.batch(_PREPARE_BATCH).map(prepare_fn)
        self._examples = tf.nest.map_structure(
          lambda *values: tf.concat(values, axis=0), *parts
        )
        self._prepare_fn = None

  def examples(self, number: int | tf.Tensor) -> tf.data.Dataset:
    """Returns the indices of a pass."""
    indices = tf.range(self.num_examples, dtype=tf.int64)
    if self.plan.is_shuffled:
      indices = tf.random.experimental.stateless_shuffle(
        indices, seed=shuffle.pass_seed(self.plan.options.seed, number)
      )
    return tf.data.Dataset.from_tensor_slices(indices)

  def decode(self, indices: tf.Tensor) -> Any:
    """Returns the examples that a batch of indices points to."""
    batch = tf.nest.map_structure(
      lambda values: tf.gather(values, indices), self._examples
    )
    return call(self._decode_fn, call(self._prepare_fn, batch))


class FileReader:
  """Reads records in parallel, and parses a whole batch in one call.

  With a cache, parsed examples are kept before the shuffle, so that later
  epochs neither read nor parse.
  """

  def __init__(
    self,
    source: files_lib.Files,
    plan: plan_lib.PipelinePlan,
    prepare_fn: Callable[..., Any] | None,
  ):
    self.plan = plan
    self._source = source
    self._prepare_fn = prepare_fn
    self._paths = plan.files_of(source.paths)
    self._counts = plan.files_of(source.counts)
    self.num_examples = sum(self._counts)
    self._cached = None
    if plan.options.cache != 'none':
      # Made once: all passes read it.
      self._cached = self._cache()

  def examples(self, number: int | tf.Tensor) -> tf.data.Dataset:
    """Returns the records of a pass."""
    examples = self._cached
    if examples is None:
      examples = self._read(number)
    return self.plan.shuffle(
      examples, number, self.plan.buffer_for(self.num_examples)
    )

  def decode(self, batch: Any) -> Any:
    """Returns the examples of a batch of records, or of parsed examples."""
    if self._cached is None:
      batch = self._parse(batch)
    return call(self._source.decode_fn, batch)

  def _parse(self, records: tf.Tensor) -> Any:
    return call(self._prepare_fn, self._source.parse_fn(records))

  def _read(self, number: int | tf.Tensor | None = None) -> tf.data.Dataset:
    """Returns the records of pass `number`; None keeps the order of the files."""
    n = self.num_examples
    paths = tf.data.Dataset.from_tensor_slices(list(self._paths))
    if number is not None and self.plan.buffer_for(n) < n:
      # A buffer that is smaller than the split mixes neighbours only, so the
      # files take turns in being neighbours.
      paths = self.plan.shuffle(paths, number, buffer=len(self._paths))
    # In evaluation one file at a time; the next ones are opened ahead.
    block = _BLOCK_LENGTH if self.plan.training else max(1, *self._counts)
    records = paths.interleave(
      self._source.read_fn,
      cycle_length=min(len(self._paths), _MAX_OPEN_FILES),
      block_length=block,
      num_parallel_calls=tf.data.AUTOTUNE,
      deterministic=True,
    )
    return records.apply(tf.data.experimental.assert_cardinality(n))

  def _cache(self) -> tf.data.Dataset:
    records = self._read()
    examples = records.batch(_PREPARE_BATCH).map(
      self._parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    # The cache, like the shuffle after it, works on examples: a cache of
    # batches would keep the same examples together for ever.
    examples = examples.unbatch()
    examples = examples.apply(
      tf.data.experimental.assert_cardinality(self.num_examples)
    )
    return examples.cache()
