"""Makes datasets of batches from a source: one function for all of them.

Every stage works on whole batches, because a call of a map function costs more
than the work on one 28x28 image. On MNIST with batches of 256, a gather for each
batch of shuffled indices is more than ten times as fast as a map for each image.

A batch goes through `prepare_fn`, the cache, `decode_fn` of the source,
`augment_fn` and `map_fn`, in this order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_strategies import errors, option_checks
from tf_strategies.data import arrays as arrays_lib
from tf_strategies.data import files as files_lib
from tf_strategies.data import options as options_lib
from tf_strategies.data import plan as plan_lib
from tf_strategies.data import readers, shuffle

_START = (0, 0)

BatchFn = Callable[..., Any]


def make_dataset(
  source: arrays_lib.Arrays | files_lib.Files | Any,
  options: options_lib.PipelineOptions,
  *,
  training: bool,
  epochs: int | None = None,
  start: Iterable[int] = _START,
  steps_per_epoch: int | None = None,
  prepare_fn: BatchFn | None = None,
  augment_fn: BatchFn | None = None,
  map_fn: BatchFn | None = None,
  input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
  """Makes the batches of a source.

  Each iteration is one epoch, in another order. With `epochs`, one iteration is
  a whole training run that can be resumed: a stream of passes over the data, in
  which the order of pass p is a function of (seed, p) alone, cut at `start`. (The
  order of `Dataset.shuffle` depends on how many iterators its dataset had before,
  and Keras makes one to look at the first batch.)

  With `steps_per_epoch`, an epoch of the stream is that many batches, however
  many passes that is, and the next epoch continues where it ended: each example
  is seen as often as any other, give or take one. No batch mixes two passes,
  unless `drop_remainder` asks for full batches alone: these are cut out of the
  stream without regard to passes, and nothing is dropped.

  Args:
    source: `Arrays`, `TFRecords` or `Files`; or an array, or a tuple or dict of
      arrays, with a row for each example.
    options: how to read, cache, shuffle, batch and parallelise. With `epochs`,
      `seed` is required; arrays are shuffled as a whole or not at all.
    training: whether to shuffle, to augment, to repeat and to drop the
      remainder as `options` say. Evaluation sees every example once, in order.
    epochs: epochs of the whole run, those before `start` included.
    start: (epoch, step) to resume at, such as a `Position`: epochs that are
      done, and batches of the next one that are.
    steps_per_epoch: batches of an epoch of the stream, more or fewer than the
      data make; None for one pass over the data.
    prepare_fn: called with the components of a batch as they are stored (in
      arrays, or as `parse_fn` returns them), returns a batch; deterministic.
      With a cache it sees each example once.
    augment_fn: called with the components of a batch and a seed, in training,
      again in each epoch; returns the batch. The seed, int64 [2], is for
      stateless random ops (`tf.image.stateless_random_flip_left_right`): calls
      run in parallel. It differs for each batch and epoch, and follows from
      `options.seed`; in a stream, from the batch's place in the run, so that a
      resumed run augments alike.
    map_fn: called last with the components of a batch; what it returns is the
      element. A random one should be an `augment_fn`.
    input_context: as `strategy.distribute_datasets_from_function` passes it.
      Each pipeline then yields per-replica batches of its share; of examples
      shared with a common seed, one step's batches together are exactly one
      process's global batch. With `epochs`, of k pipelines each yields every
      k-th batch of the stream, whole: for workers that train on batches of their
      own, as with parameter servers.

  Returns:
    A dataset of known cardinality. A start in the middle
    of a pass takes nothing more for arrays. Files read, but do not decode, the
    records of that pass that come before it.

  Raises:
    UnsupportedOptionError: options that do not fit the source, `epochs` or
      `input_context`.
    DataError: this pipeline's share has no example, or no full batch.

  Example:

    >>> import numpy as np
    >>> from tf_strategies import data
    >>> options = data.PipelineOptions(global_batch_size=4, seed=1)
    >>> run = lambda start: list(data.make_dataset(
    ...   np.arange(6), options, training=True, epochs=2, start=start))
    >>> whole, resumed = run((0, 0)), run((1, 0))
    >>> bool((whole[2] == resumed[0]).numpy().all())
    True
  """
  option_checks.check_type(
    'options',
    options,
    options_lib.PipelineOptions,
    'tfs.data.PipelineOptions',
    'write tfs.data.PipelineOptions(global_batch_size=256)',
  )
  option_checks.check_bool('training', training, 'write True or False')
  if not isinstance(source, arrays_lib.Arrays | files_lib.Files):
    source = arrays_lib.Arrays(source)
  num_files = 0 if isinstance(source, arrays_lib.Arrays) else len(source.paths)
  for name, function in (
    ('prepare_fn', prepare_fn),
    ('augment_fn', augment_fn),
    ('map_fn', map_fn),
  ):
    option_checks.check_function(name, function, or_none=True)
  option_checks.check_type(
    'input_context',
    input_context,
    (tf.distribute.InputContext, type(None)),
    'a tf.distribute.InputContext, or None',
    'pass what strategy.distribute_datasets_from_function passes',
  )
  start = _position(start)
  augment_fn = augment_fn if training else None
  if epochs is None:
    _check_no_start(start, steps_per_epoch)
    plan = plan_lib.make(options, training, input_context, num_files)
  else:
    plan_lib.check_stream(options, training, input_context, not num_files)
    _check_span(epochs, *start, steps_per_epoch)
    plan = plan_lib.make(options, training, None, num_files)
  if num_files:
    source = source.share(plan)
  # Full batches can be cut out of several passes.
  across_passes = options.drop_remainder and steps_per_epoch is not None
  if not (across_passes and source.num_examples):
    plan.check_share(plan.share_of(source.num_examples))
  make_reader = readers.FileReader if num_files else readers.ArrayReader
  reader = make_reader(source, plan, prepare_fn)
  if epochs is None:
    batches = _in_a_row(reader, plan)
    make_seeds = functools.partial(
      shuffle.batch_seeds, options.seed, plan.context_pipeline
    )
  else:
    per_epoch = steps_per_epoch or plan.num_batches(source.num_examples)
    first = start[0] * per_epoch + start[1]
    count = max(0, epochs * per_epoch - first)
    batches = _stream(reader, plan, first, count, across_passes)
    make_seeds = functools.partial(
      shuffle.stream_seeds, options.seed, first, count
    )
  load = _load_fn(reader, augment_fn, map_fn, batches.element_spec)
  if augment_fn:
    batches = tf.data.Dataset.zip((batches, make_seeds()))
  if epochs is not None and input_context is not None:
    batches = batches.shard(
      input_context.num_input_pipelines, input_context.input_pipeline_id
    )
  return _in_parallel(batches, load, plan)


def _position(start) -> tuple[Any, Any]:
  """Returns `start` as a position. The numbers are not checked yet."""
  pair = tuple(start) if isinstance(start, Iterable) else ()
  option_checks.check(
    len(pair) == 2,
    f'start={start!r}',
    '(epoch, step)',
    'write start=(2, 0) after two epochs, or leave it out',
  )
  return pair


def _check_no_start(start, steps_per_epoch):
  if start != _START or steps_per_epoch is not None:
    raise errors.UnsupportedOptionError(
      f'start={start} and steps_per_epoch={steps_per_epoch} without epochs',
      'epochs, the length of the whole run, beside them',
      'pass epochs=...',
    )


def _check_span(epochs, epoch, step, steps_per_epoch):
  for name, value, least in (
    ('epochs', epochs, 0),
    ('steps_per_epoch', steps_per_epoch, 1),
    ('start epoch', epoch, 0),
    ('start step', step, 0),
  ):
    if value is not None:
      fix = 'leave it out, or count from 0'
      option_checks.check_int(name, value, least, fix=fix)


def _in_a_row(reader, plan) -> tf.data.Dataset:
  """Returns the batches of an epoch, or of one after the other without end."""
  batches = reader.batches()
  # After the batch, so that no batch mixes two epochs; before the map, so that it
  # runs on into the next epoch.
  if plan.repeats:
    batches = batches.repeat()
  return batches


def _stream(reader, plan, first, count, across_passes) -> tf.data.Dataset:
  """Returns batches first, ..., first + count - 1 of the passes in a row."""
  if across_passes:
    n, size, each = reader.num_examples, plan.batch_size, reader.examples
  else:
    n, size, each = plan.num_batches(reader.num_examples), 1, reader.batches
  first_pass, skipped = divmod(first * size, n)
  num_passes = math.ceil((skipped + count * size) / n)
  passes = tf.data.Dataset.range(first_pass, first_pass + num_passes)
  batches = passes.flat_map(each).skip(skipped)
  if across_passes:
    batches = batches.batch(size, drop_remainder=True)
  batches = batches.take(count)
  return batches.apply(tf.data.experimental.assert_cardinality(count))


def _load_fn(reader, augment_fn, map_fn, batch_spec) -> BatchFn:
  """Returns what makes an element of what a reader yields, and of a seed."""

  def load(batch, seed=None):
    batch = reader.decode(batch)
    if augment_fn:
      batch = readers.call(augment_fn, batch, seed)
    return readers.call(map_fn, batch)

  if augment_fn or not isinstance(batch_spec, tuple):
    return load
  return lambda *batch: load(batch)  # A map unpacks a tuple.


def _in_parallel(batches, load, plan) -> tf.data.Dataset:
  """Maps `load` over batches, ahead of the step."""
  options = plan.options
  dataset = batches.map(
    load,
    num_parallel_calls=options.num_parallel_calls,
    deterministic=options.deterministic,
  )
  if options.prefetch:
    dataset = dataset.prefetch(options.prefetch)
  chosen = tf.data.Options()
  chosen.deterministic = options.deterministic
  chosen.experimental_distribute.auto_shard_policy = getattr(
    tf.data.experimental.AutoShardPolicy, options.autoshard.upper()
  )
  return dataset.with_options(chosen)
