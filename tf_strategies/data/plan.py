"""The meaning of the options for one split of one input pipeline."""

import dataclasses

import tensorflow as tf

from tf_strategies import errors, option_checks
from tf_strategies.data import shuffle
from tf_strategies.data.options import PipelineOptions

_ALL = slice(0, None, 1)
# Not 0: TensorFlow would compare the seed of the pass too, which is a tensor.
_SEED_OF_GRAPH = 1


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
  """The options, resolved for one split of one input pipeline.

  Attributes:
    options: as the user passed them.
    training: whether this is the training split.
    batch_size: examples in a batch of this pipeline.
    num_pipelines: number of pipelines that share the data.
    pipeline: the number of this one among them.
    files: which files this one reads.
    examples: which of their examples it takes.
  """

  options: PipelineOptions
  training: bool
  batch_size: int
  num_pipelines: int
  pipeline: int
  files: slice
  examples: slice

  @property
  def is_shuffled(self) -> bool:
    """Returns whether each epoch has an order of its own."""
    return self.training and self.options.shuffle_buffer != 0

  @property
  def drop_remainder(self) -> bool:
    """Returns whether a last, partial batch is left out."""
    return self.training and self.options.drop_remainder

  def batches(self, examples: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the batches of this pipeline's share of the examples."""
    if self.examples != _ALL:
      examples = examples.shard(self.examples.step, self.examples.start)
    return examples.batch(self.batch_size, drop_remainder=self.drop_remainder)

  def shuffle(
    self, dataset: tf.data.Dataset, number: int | tf.Tensor, buffer: int
  ) -> tf.data.Dataset:
    """Returns the dataset in the order of pass `number`, if it is shuffled.

    It is called in a function of tf.data.
    """
    if not self.is_shuffled:
      return dataset
    # That of this function's graph, in place of the program's.
    tf.random.set_seed(_SEED_OF_GRAPH)
    key = shuffle.pass_seed(self.options.seed, number)
    seed = tf.random.stateless_uniform([], key, 0, 2**31 - 1, tf.int64)
    return dataset.shuffle(buffer, seed, reshuffle_each_iteration=False)

  def check_share(self, n: int, across_passes: bool = False) -> None:
    """Raises a DataError if `n` examples make no batch of this pipeline.

    Args:
      n: number of examples.
      across_passes: whether a batch may have examples of several passes.
    """
    if not n:
      raise errors.DataError(
        f'Input pipeline {self.pipeline} of {self.num_pipelines}: Expected at '
        'least one example, got none. Fix: use fewer pipelines or more data.'
      )
    if self.drop_remainder and not across_passes and n < self.batch_size:
      raise errors.DataError(
        'Expected at least one full batch with drop_remainder=True, got '
        f'{n} examples and no full batch of {self.batch_size}. Fix: '
        'pass a smaller global_batch_size or drop_remainder=False.'
      )


def make(
  options: PipelineOptions,
  training: bool,
  context: tf.distribute.InputContext,
  num_files: int = 0,
) -> PipelinePlan:
  """Resolves the batch size and the share of this input pipeline.

  Pipelines share the files if each gets as many as the others. Otherwise each
  takes every k-th example of one order.

  Raises:
    UnsupportedOptionError: the batch or the seed does not fit `context`.
  """
  size = int(options.global_batch_size)
  replicas = context.num_replicas_in_sync
  pipelines, number = context.num_input_pipelines, context.input_pipeline_id
  if size % replicas:
    raise errors.UnsupportedOptionError(
      f'global_batch_size={size} with {replicas} replicas',
      'a multiple of the number of replicas',
      f'pass {-(-size // replicas) * replicas}',
    )
  mine = slice(number, None, pipelines)
  shares_files = num_files > 0 == num_files % pipelines
  shares = (mine, _ALL) if shares_files else (_ALL, mine)
  plan = PipelinePlan(
    options, training, size // replicas, pipelines, number, *shares
  )
  if plan.is_shuffled and plan.examples != _ALL and options.seed is None:
    # Each pipeline takes every k-th example of the shuffled order. If the orders
    # differed, some examples would be taken twice and some never.
    raise errors.UnsupportedOptionError(
      f'seed=None with {pipelines} input pipelines that share examples',
      'the same seed in every pipeline',
      'pass seed=0, or shuffle_buffer=0',
    )
  return plan


def check_stream(
  options: PipelineOptions,
  training: bool,
  context: tf.distribute.InputContext,
) -> None:
  """Raises if epochs cannot be computed again, batch by batch."""
  option_checks.check(
    training,
    'training=False for epochs that can be resumed',
    'training=True',
    'leave epochs and start out',
  )
  option_checks.check(
    options.seed is not None,
    'seed=None for epochs that can be resumed',
    'an integer',
    'pass PipelineOptions(seed=...), or leave epochs and start out',
  )
  # A batch of the stream is one step of all replicas, not a part of one.
  option_checks.check(
    context.num_replicas_in_sync == 1,
    f'num_replicas_in_sync={context.num_replicas_in_sync}',
    'num_replicas_in_sync=1 in the input_context of epochs',
    'write strategy.experimental_distribute_dataset(make_dataset(...)) '
    'without an input_context: it splits each batch for the replicas',
  )
