"""Makes datasets of batches from a source: one function for all of them.

Every stage works on whole batches, because a call of a map function costs more
than the work on one 28x28 image. On MNIST with batches of 256, a gather for each
batch of shuffled indices is more than ten times as fast as a map for each image.

A batch goes through `prepare_fn`, the cache, `decode_fn` of the source,
`augment_fn` and `map_fn`, in this order.

A pass reads the data once. Its order is a function of (seed, number of the pass)
alone. An epoch without `epochs` is a pass with a random number. A run of `epochs`
is the passes 0, 1, 2 and so on in a row, so that a part of it can be computed
again. The order of `Dataset.shuffle` could not: it depends on how many iterators
its dataset had before, and Keras makes one to look at the first batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_strategies import option_checks
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
  a whole training run, which can be resumed at `start`. In such a
  run, the numbers of uses of two examples differ by at most one. A batch has examples of one pass over the
  data, unless `steps_per_epoch` and `drop_remainder` ask for full batches.

  Args:
    source: `Arrays`, `TFRecords` or `Files`; or arrays, as in `Arrays`.
    options: how to shuffle, batch and cache. `epochs` require a `seed`.
    training: whether to shuffle, to augment and to drop the remainder as
      `options` say. Evaluation sees every example once, in order.
    epochs: epochs of the whole run, those before `start` included.
    start: (epoch, step) to resume at, such as a `Position`: finished epochs, and
      finished batches of the next one.
    steps_per_epoch: batches of an epoch of the run, more or fewer than the data
      make. The next epoch goes on in the data. None for one pass an epoch.
    prepare_fn: called with the stored components of a batch (as arrays have them,
      or as `parse_fn` returns them), returns a batch; deterministic.
      With a cache it sees each example once.
    augment_fn: called in training with the components of a batch and a seed,
      int64 [2], for stateless random ops; returns the batch. The seed follows
      from `options.seed` and the place of the batch in the run.
    map_fn: called last with the components of a batch; returns the element.
    input_context: as `strategy.distribute_datasets_from_function` passes it.
      Each pipeline then yields per-replica batches of its share. With `epochs`,
      each of k pipelines yields every k-th batch of the run, whole: for workers
      that train on batches of their own, as with parameter servers.

  Returns:
    A dataset of known cardinality. To start in the middle of a pass, files read
    the records before it too, but do not decode them.

  Raises:
    UnsupportedOptionError: options that do not fit `epochs` or `input_context`.
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
  _check_types(
    options,
    training,
    {'prepare_fn': prepare_fn, 'augment_fn': augment_fn, 'map_fn': map_fn},
    input_context,
  )
  position = _check_span(epochs, start, steps_per_epoch)
  context = input_context
  if epochs is not None:
    plan_lib.check_stream(options, training, context)
    context = None  # A batch is one of all pipelines.
  reader = _reader(source, options, training, prepare_fn, context)
  batches = _batches(reader, epochs, position, steps_per_epoch)
  if epochs is not None and input_context is not None:
    batches = batches.shard(
      input_context.num_input_pipelines, input_context.input_pipeline_id
    )
  return _load(batches, reader, augment_fn if training else None, map_fn)


def _check_types(options, training, functions, input_context):
  option_checks.check_type(
    'options',
    options,
    options_lib.PipelineOptions,
    'tfs.data.PipelineOptions',
    'write tfs.data.PipelineOptions(global_batch_size=256)',
  )
  option_checks.check_bool('training', training, 'write True or False')
  for name, function in functions.items():
    option_checks.check_function(name, function, or_none=True)
  option_checks.check_type(
    'input_context',
    input_context,
    (tf.distribute.InputContext, type(None)),
    'a tf.distribute.InputContext, or None',
    'pass what strategy.distribute_datasets_from_function passes',
  )


def _check_span(epochs, start, steps_per_epoch) -> tuple[Any, Any]:
  """Returns `start` as (epoch, step)."""
  position = tuple(start) if isinstance(start, Iterable) else ()
  option_checks.check(
    len(position) == 2,
    f'start={start!r}',
    'a pair (epoch, step)',
    'write start=(2, 0) after two epochs, or leave it out',
  )
  option_checks.check(
    epochs is not None or (position == _START and steps_per_epoch is None),
    f'start={start} and steps_per_epoch={steps_per_epoch} without epochs',
    'epochs, the length of the whole run',
    'pass epochs too',
  )
  for name, value, least in (
    ('epochs', epochs, 0),
    ('steps_per_epoch', steps_per_epoch, 1),
    ('start epoch', position[0], 0),
    ('start step', position[1], 0),
  ):
    if value is not None:
      fix = 'leave it out, or count from 0'
      option_checks.check_int(name, value, least, fix=fix)
  return position


def _reader(source, options, training, prepare_fn, context):
  """Returns the reader of this pipeline's share."""
  if isinstance(source, files_lib.Files):
    plan = plan_lib.make(options, training, context, len(source.paths))
    return readers.FileReader(source, plan, prepare_fn)
  if not isinstance(source, arrays_lib.Arrays):
    source = arrays_lib.Arrays(source)
  plan = plan_lib.make(options, training, context)
  return readers.ArrayReader(source, plan, prepare_fn)


def _batches(reader, epochs, position, steps_per_epoch) -> tf.data.Dataset:
  """Returns (batch, place) for each batch of an epoch, or of the rest of a run."""
  plan, n = reader.plan, reader.plan.share_of(reader.num_examples)
  across_passes = plan.drop_remainder and steps_per_epoch is not None
  plan.check_share(n, across_passes)
  per_pass = plan.num_batches(n)
  first, count, size = 0, per_pass, 1
  if epochs is not None:
    steps = steps_per_epoch or per_pass
    first = position[0] * steps + position[1]
    count = max(0, epochs * steps - first)
  if across_passes:  # Full batches are cut out of the examples of all passes.
    size, per_pass = plan.batch_size, n
  first_pass, skipped = divmod(first * size, per_pass)
  num_passes = math.ceil((skipped + count * size) / per_pass)
  passes = tf.data.Dataset.range(first_pass, first_pass + num_passes)
  places = tf.data.Dataset.range(first, first + count)
  if epochs is None and plan.training:
    # Each iteration is another pass.
    passes = shuffle.random_number(plan.options.seed).map(lambda i: i % 2**62)
    places = passes.flat_map(lambda i: tf.data.Dataset.range(i, i + count))
  if across_passes:
    batches = plan.batches(passes.flat_map(reader.examples).skip(skipped))
  else:
    batches = passes.flat_map(lambda i: plan.batches(reader.examples(i)))
    batches = batches.skip(skipped)
  batches = tf.data.Dataset.zip((batches, places))
  return batches.apply(tf.data.experimental.assert_cardinality(count))


def _load(batches, reader, augment_fn, map_fn) -> tf.data.Dataset:
  """Returns the elements, which are made in parallel and ahead of the step."""
  # The default of `fit`. The data are shuffled already, as the options say.
  warnings.filterwarnings(
    'ignore', '`shuffle=True` was passed, but will be ignored'
  )
  plan = reader.plan

  def load(batch, place):
    batch = reader.decode(batch)
    if augment_fn:
      seed = shuffle.batch_seed(plan.options.seed, plan.pipeline, place)
      batch = readers.call(augment_fn, batch, seed)
    return readers.call(map_fn, batch)

  dataset = batches.map(
    load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
  ).prefetch(tf.data.AUTOTUNE)
  chosen = tf.data.Options()
  # Shards of files would be whole passes here: the files are read in a function
  # of the pass.
  chosen.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
  )
  return dataset.with_options(chosen)
