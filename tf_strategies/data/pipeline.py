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

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_strategies import option_checks
from tf_strategies.data import plan as plan_lib
from tf_strategies.data import shuffle
from tf_strategies.data.files import Arrays, Files
from tf_strategies.data.options import PipelineOptions

_MAX_OPEN_FILES = 16
# Records that training takes from one file before the next: one at a time costs a
# third of the throughput.
_BLOCK_LENGTH = 16
# Examples that one call prepares where the result is kept.
_PREPARE_BATCH = 256
_START = (0, 0)

BatchFn = Callable[..., Any]


def make_dataset(
  source: Arrays | Files | Any,
  options: PipelineOptions,
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
  a whole training run, which can be resumed at `start`. In a run, two examples
  are used equally often, or one of them once more. A batch has examples of one
  pass over the data, unless `steps_per_epoch` and `drop_remainder` ask for full
  batches.

  Args:
    source: `Arrays`, `TFRecords` or `Files`; or arrays, as in `Arrays`.
    options: how to shuffle, batch and cache. `epochs` require a `seed`.
    training: whether to shuffle, to augment and to drop the remainder as
      `options` say. Evaluation sees every example once, in order.
    epochs: epochs of the whole run, including those before `start`.
    start: (epoch, step) to resume at, such as a `Position`: finished epochs, and
      finished batches of the next one.
    steps_per_epoch: batches in an epoch of the run, more or fewer than in a pass.
      The next epoch continues in the data. None for one pass an epoch.
    prepare_fn: called with the stored components of a batch (as arrays have them,
      or as `parse_fn` returns them), returns a batch; deterministic.
      With a cache it sees each example once.
    augment_fn: called in training with the components of a batch and a seed,
      int64 [2], for stateless random ops; returns the batch. The seed follows
      from `options.seed` and the place of the batch in the run.
    map_fn: called last with the components of a batch; returns the element.
    input_context: as `strategy.distribute_datasets_from_function` passes it.
      Each pipeline then yields per-replica batches of its share. With `epochs`,
      each of k pipelines yields every k-th global batch of the run, for workers
      that train on different batches, as with parameter servers.

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
  _check_types(options, training, prepare_fn, augment_fn, map_fn, input_context)
  position = _check_span(epochs, start, steps_per_epoch)
  alone = tf.distribute.InputContext()
  context = input_context or alone
  if epochs is not None:
    plan_lib.check_stream(options, training, context)
  # In a run a batch is one of all pipelines.
  of_reader = context if epochs is None else alone
  reader = _reader(source, options, training, prepare_fn, of_reader)
  batches = _batches(reader, epochs, position, steps_per_epoch)
  if epochs is not None:
    batches = batches.shard(
      context.num_input_pipelines, context.input_pipeline_id
    )
  return _load(batches, reader, augment_fn if training else None, map_fn)


def _check_types(
  options, training, prepare_fn, augment_fn, map_fn, input_context
) -> None:
  """Raises UnsupportedOptionError for arguments of other types."""
  option_checks.check_type(
    'options',
    options,
    PipelineOptions,
    'tfs.data.PipelineOptions',
    'write tfs.data.PipelineOptions(global_batch_size=256)',
  )
  option_checks.check_bool('training', training, 'write True or False')
  option_checks.check_function('prepare_fn', prepare_fn, or_none=True)
  option_checks.check_function('augment_fn', augment_fn, or_none=True)
  option_checks.check_function('map_fn', map_fn, or_none=True)
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
  if isinstance(source, Files):
    plan = plan_lib.make(options, training, context, len(source.paths))
    return FileReader(source, plan, prepare_fn)
  if not isinstance(source, Arrays):
    source = Arrays(source)
  plan = plan_lib.make(options, training, context)
  return ArrayReader(source, plan, prepare_fn)


def _batches(reader, epochs, position, steps_per_epoch) -> tf.data.Dataset:
  """Returns (batch, place) for each batch of an epoch, or of the rest of a run."""
  plan = reader.plan
  n = len(range(reader.num_examples)[plan.examples])
  across_passes = plan.drop_remainder and steps_per_epoch is not None
  plan.check_share(n, across_passes)
  per_pass = (
    n // plan.batch_size if plan.drop_remainder else -(-n // plan.batch_size)
  )
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
      batch = call(augment_fn, batch, seed)
    return call(map_fn, batch)

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
    source: Arrays,
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
    source: Files,
    plan: plan_lib.PipelinePlan,
    prepare_fn: Callable[..., Any] | None,
  ):
    self.plan = plan
    self._source = source
    self._prepare_fn = prepare_fn
    self._paths = source.paths[plan.files]
    self._counts = source.counts[plan.files]
    self.num_examples = n = sum(self._counts)
    wanted = plan.options.shuffle_buffer
    # tf.data wants a buffer of at least 1; `check_share` reports an empty split.
    self._buffer = max(1, n if wanted is None else min(wanted, n))
    self._cached = None
    if plan.options.cache == 'memory':
      examples = self._read().batch(_PREPARE_BATCH)
      examples = examples.map(
        self._parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
      )
      # The cache, like the shuffle after it, works on examples: a cache of
      # batches would keep the same examples together for ever.
      examples = examples.unbatch()
      examples = examples.apply(tf.data.experimental.assert_cardinality(n))
      # Made once: all passes read it.
      self._cached = examples.cache()

  def examples(self, number: int | tf.Tensor) -> tf.data.Dataset:
    """Returns the records of a pass."""
    examples = self._cached
    if examples is None:
      examples = self._read(number)
    return self.plan.shuffle(examples, number, self._buffer)

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
    if number is not None and self._buffer < n:
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
