"""What the options mean for one split of one input pipeline."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_strategies import errors, option_checks
from tf_strategies.data import options as options_lib
from tf_strategies.data import shuffle


@dataclasses.dataclass(frozen=True)
class Plan:
  """The options, resolved for one split of one input pipeline."""

  options: options_lib.PipelineOptions
  training: bool
  batch_size: int  # Of this pipeline.
  num_pipelines: int = 1  # That share the examples.
  pipeline: int = 0  # The number of this one among them.
  shard_files: bool = False  # Whether they share files instead of examples.
  context_pipeline: int = 0  # The number of this one, whether or not it shares.

  @property
  def is_shuffled(self) -> bool:
    """Returns whether each epoch has an order of its own."""
    return self.training and self.options.shuffle_buffer != 0

  @property
  def drop_remainder(self) -> bool:
    """Returns whether a last, partial batch is left out."""
    return self.training and self.options.drop_remainder

  @property
  def repeats(self) -> bool:
    """Returns whether epochs follow each other without end."""
    return self.training and self.options.repeat

  @property
  def shares_examples(self) -> bool:
    """Returns whether each pipeline takes every k-th example of one common order."""
    return self.num_pipelines > 1 and not self.shard_files

  @property
  def reads_in_order(self) -> bool:
    """Returns whether files must be read in one order, whatever the parallelism.

    Pipelines that take every k-th example must agree on which is the k-th: in
    the order of arrival some examples would be taken twice and some never.
    """
    return self.options.deterministic or self.shares_examples

  @property
  def places(self) -> slice:
    """Which places of the common order this pipeline takes."""
    if not self.shares_examples:
      return slice(None)
    return slice(self.pipeline, None, self.num_pipelines)

  def share_of(self, n: int) -> int:
    """Returns how many of `n` examples this pipeline takes."""
    return len(range(n)[self.places])

  def num_batches(self, n: int) -> int:
    """Returns how many batches n examples of this pipeline make."""
    size = self.batch_size
    return n // size if self.drop_remainder else -(-n // size)

  def files_of(self, paths: tuple) -> tuple:
    """Returns the files that this pipeline reads."""
    if not self.shard_files:
      return paths
    return paths[self.pipeline :: self.num_pipelines]

  def buffer_for(self, n: int) -> int:
    """Returns the size of the shuffle buffer for a split of `n` examples."""
    wanted = self.options.shuffle_buffer
    # tf.data wants a buffer of at least 1; `check_share` reports an empty one.
    return max(1, n if wanted is None else min(wanted, n))

  def shuffle(
    self,
    dataset: tf.data.Dataset,
    number: int | tf.Tensor | None,
    buffer: int,
  ) -> tf.data.Dataset:
    """Shuffles if the plan says so, in each iteration anew or as pass `number`."""
    if not self.is_shuffled:
      return dataset
    return shuffle.shuffle(dataset, buffer, self.options.seed, number)

  def batch(self, examples: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the batches of examples."""
    return examples.batch(self.batch_size, drop_remainder=self.drop_remainder)

  def check_share(self, n: int) -> None:
    """Raises a DataError if `n` examples make no batch of this pipeline."""
    if not n:
      raise errors.DataError(
        f'Input pipeline {self.pipeline} of {self.num_pipelines}: Expected at '
        'least one example, got none. Fix: use fewer pipelines or more data'
      )
    if self.drop_remainder and n < self.batch_size:
      raise errors.DataError(
        'Expected at least one full batch with drop_remainder=True, got '
        f'{n} examples and no full batch of {self.batch_size}. Fix: '
        'pass a smaller global_batch_size or drop_remainder=False'
      )


def make(
  options: options_lib.PipelineOptions,
  training: bool,
  context: tf.distribute.InputContext | None,
  num_files: int = 0,
) -> Plan:
  """Resolves the batch size and the share of this input pipeline.

  Raises an UnsupportedOptionError for options that do not fit arrays, which have
  no files, and for batches or shares that do not fit `context`.
  """
  if not num_files:
    _check_array_options(options)
  size = int(options.global_batch_size)
  if context is None:
    return Plan(options, training, size)
  replicas, pipelines = (
    context.num_replicas_in_sync,
    context.num_input_pipelines,
  )
  if size % replicas:
    raise errors.UnsupportedOptionError(
      f'global_batch_size={size} with {replicas} replicas',
      'a multiple of the number of replicas',
      f'pass {-(-size // replicas) * replicas}',
    )
  plan = Plan(
    options,
    training,
    size // replicas,
    context_pipeline=context.input_pipeline_id,
  )
  if options.autoshard == 'off' or pipelines == 1:
    return plan
  if options.autoshard == 'file' and num_files < pipelines:
    raise errors.UnsupportedOptionError(
      f"autoshard='file' with {num_files} files for {pipelines} pipelines",
      'at least one file for each input pipeline',
      "write autoshard='data', or write the data again to a multiple of "
      f'{pipelines} files',
    )
  plan = dataclasses.replace(
    plan,
    num_pipelines=pipelines,
    pipeline=context.input_pipeline_id,
    shard_files=options.autoshard == 'file'
    or (options.autoshard == 'auto' and num_files > 0 == num_files % pipelines),
  )
  if plan.is_shuffled and plan.shares_examples and options.seed is None:
    # Each pipeline takes every k-th example of the shuffled order: of orders
    # that differ, some examples would be taken twice and some never.
    raise errors.UnsupportedOptionError(
      f'seed=None with {pipelines} input pipelines that share examples',
      'the same seed in every pipeline',
      'pass seed=0, or shuffle_buffer=0',
    )
  return plan


def _check_array_options(options: options_lib.PipelineOptions) -> None:
  if options.autoshard == 'file':
    raise errors.UnsupportedOptionError(
      "autoshard='file' with arrays",
      "'off', 'auto' or 'data' for data that are in no file",
      "write autoshard='data', or use TFRecords",
    )


def check_stream(
  options: options_lib.PipelineOptions,
  training: bool,
  context: tf.distribute.InputContext | None,
  is_in_memory: bool,
) -> None:
  """Raises if epochs cannot be computed again, batch by batch."""
  whole = 'leave epochs and start out'
  for is_good, received, expected, fix in (
    (training, 'training=False', 'training=True', ''),
    (
      options.seed is not None,
      'seed=None',
      'an integer',
      'pass PipelineOptions(seed=...), or ',
    ),
    (
      options.deterministic,
      'deterministic=False',
      'True, because the order of arrival differs from run to run',
      'leave deterministic out, or ',
    ),
    (
      not is_in_memory or options.shuffle_buffer in (None, 0),
      f'shuffle_buffer={options.shuffle_buffer}',
      'None (a uniform shuffle) or 0 (none) with arrays',
      'leave shuffle_buffer out, or ',
    ),
  ):
    received = f'{received} for epochs that can be resumed'
    option_checks.check(is_good, received, expected, fix + whole)
  if context is not None and context.num_replicas_in_sync != 1:
    # A batch of the stream is one step of all replicas, not a part of one.
    raise errors.UnsupportedOptionError(
      f'num_replicas_in_sync={context.num_replicas_in_sync} in the '
      'input_context of epochs',
      '1, for workers that train on whole batches of their own',
      'write strategy.experimental_distribute_dataset(make_dataset(...)) '
      'without an input_context, which splits each batch for the replicas',
    )
