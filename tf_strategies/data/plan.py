"""What the options mean for one split of one input pipeline.

Example:

  >>> from tf_strategies.data import options, plan
  >>> chosen = options.PipelineOptions(global_batch_size=8, shuffle_buffer=0)
  >>> plan.make(chosen, training=True, context=None).share_of(10)
  10
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.data import options as options_lib


@dataclasses.dataclass(frozen=True)
class Plan:
  """The options, resolved for one split of one input pipeline.

  Attributes:
    options: as the user gave them.
    training: whether to shuffle, repeat, augment and drop the remainder.
    batch_size: examples in a batch of this pipeline.
    num_pipelines: how many pipelines share the examples out.
    pipeline: the number of this one.
    shard_files: whether files are shared out instead of examples.
    context_pipeline: the number of this pipeline, shared out or not.
  """

  options: options_lib.PipelineOptions
  training: bool
  batch_size: int
  num_pipelines: int = 1
  pipeline: int = 0
  shard_files: bool = False
  context_pipeline: int = 0

  @property
  def is_shuffled(self) -> bool:
    """Whether the order is drawn anew in each epoch."""
    return self.training and self.options.shuffle_buffer != 0

  @property
  def drop_remainder(self) -> bool:
    """Whether a last, partial batch is left out."""
    return self.training and self.options.drop_remainder

  @property
  def shares_examples(self) -> bool:
    """Whether each pipeline takes every k-th example of one common order."""
    return self.num_pipelines > 1 and not self.shard_files

  @property
  def reads_in_order(self) -> bool:
    """Whether files must be read in one order, whatever the parallelism.

    Pipelines that take every k-th example must agree on which is the k-th: in
    the order of arrival some examples would be taken twice and some never.
    """
    return self.options.deterministic or self.shares_examples

  @property
  def share(self) -> slice:
    """Which places of the common order are this pipeline's."""
    if not self.shares_examples:
      return slice(None)
    return slice(self.pipeline, None, self.num_pipelines)

  def share_of(self, n: int) -> int:
    """How many of `n` examples are this pipeline's."""
    return len(range(n)[self.share])

  def num_batches(self, n: int) -> int:
    """How many batches n examples of this pipeline make."""
    size = self.batch_size
    return n // size if self.drop_remainder else -(-n // size)

  def files_of(self, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the files that this pipeline reads."""
    if not self.shard_files:
      return paths
    return paths[self.pipeline :: self.num_pipelines]

  def buffer_for(self, n: int) -> int:
    """The size of the shuffle's buffer for a split of `n` examples."""
    wanted = self.options.shuffle_buffer
    # tf.data refuses a buffer of 0; no example at all is refused later on.
    return max(1, n if wanted is None else min(wanted, n))


def make(
  options: options_lib.PipelineOptions,
  training: bool,
  context: tf.distribute.InputContext | None,
  num_files: int = 0,
) -> Plan:
  """Resolves the batch size and the share of this input pipeline.

  Args:
    options: as the user gave them.
    training: whether the split is trained on.
    context: as `strategy.distribute_datasets_from_function` passes it.
    num_files: how many files there are; 0 for arrays.

  Raises:
    UnsupportedOptionError: batches or shares that do not fit `context`.
  """
  plan = Plan(options, training, int(options.global_batch_size))
  if context is None:
    return plan
  replicas = context.num_replicas_in_sync
  if plan.batch_size % replicas:
    raise errors.UnsupportedOptionError(
      f'global_batch_size={plan.batch_size} with {replicas} replicas',
      'a multiple of the number of replicas',
      f'pass {-(-plan.batch_size // replicas) * replicas}',
    )
  plan = dataclasses.replace(
    plan,
    batch_size=plan.batch_size // replicas,
    context_pipeline=context.input_pipeline_id,
  )
  pipelines = context.num_input_pipelines
  if options.autoshard == 'off' or pipelines == 1:
    return plan
  if options.autoshard == 'file' and num_files < pipelines:
    raise errors.UnsupportedOptionError(
      f"autoshard='file' with {num_files} files for {pipelines} pipelines",
      'at least one file for each input pipeline',
      "write autoshard='data', or write the shards again with "
      f'num_shards={pipelines}',
    )
  plan = dataclasses.replace(
    plan,
    num_pipelines=pipelines,
    pipeline=context.input_pipeline_id,
    shard_files=options.autoshard == 'file'
    or (options.autoshard == 'auto' and num_files > 0 == num_files % pipelines),
  )
  if plan.shares_examples and options.service is not None:
    # Its workers share the examples out a second time, as they go: the k-th of
    # one pipeline is not the k-th of another.
    raise errors.UnsupportedOptionError(
      f'service={options.service!r} with {pipelines} input pipelines that '
      'share examples',
      'one pipeline, or pipelines with files of their own',
      "write autoshard='file' with a multiple of that many files, or leave "
      'service out',
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


def refuse_file_options(options: options_lib.PipelineOptions) -> None:
  """Refuses what arrays, which are in no file, have no use for.

  Raises:
    UnsupportedOptionError: `cache='disk'` or `autoshard='file'`.
  """
  if options.cache == 'disk':
    raise errors.UnsupportedOptionError(
      "cache='disk' with arrays",
      "'none' or 'memory' for data that are in memory already",
      'leave cache out, or use write_tfrecords and make_tfrecord_dataset',
    )
  if options.autoshard == 'file':
    raise errors.UnsupportedOptionError(
      "autoshard='file' with arrays",
      "'off', 'auto' or 'data' for data that are in no file",
      "write autoshard='data', or use write_tfrecords and "
      'make_tfrecord_dataset',
    )


def refuse_for_epochs(
  options: options_lib.PipelineOptions,
  context: tf.distribute.InputContext | None,
) -> None:
  """Refuses what epochs that can be computed again, batch by batch, have not.

  Args:
    options: as the user gave them.
    context: of the pipeline that takes whole batches in turn with others.

  Raises:
    UnsupportedOptionError: `service`, no seed, `deterministic=False`, or a
      `context` of several replicas.
  """
  if options.service is not None:
    raise errors.UnsupportedOptionError(
      f'service={options.service!r} for epochs that can be resumed',
      'no service: its workers decide the order as they go',
      'leave service out, or use make_dataset',
    )
  if options.seed is None:
    raise errors.UnsupportedOptionError(
      'seed=None for epochs that can be resumed',
      'an integer',
      'pass PipelineOptions(seed=...), or use make_dataset',
    )
  if not options.deterministic:
    raise errors.UnsupportedOptionError(
      'deterministic=False for epochs that can be resumed',
      'True: batches and records that come in the order of arrival come in '
      'another one next time',
      'leave deterministic out, or use make_dataset or make_tfrecord_dataset',
    )
  if context is not None and context.num_replicas_in_sync != 1:
    # A batch of the stream is one step of all replicas, not a part of one.
    raise errors.UnsupportedOptionError(
      f'num_replicas_in_sync={context.num_replicas_in_sync} in the '
      'input_context of epochs',
      '1, for workers that train on whole batches of their own',
      'write strategy.experimental_distribute_dataset(make_epochs(...)) '
      'without an input_context, which splits each batch for the replicas',
    )
