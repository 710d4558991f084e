"""Load: batches, in parallel and ahead of the step; here or by a service.

Example:

  >>> import tensorflow as tf
  >>> from tf_strategies.data import loading, options, plan
  >>> chosen = options.PipelineOptions(global_batch_size=3)
  >>> here = plan.make(chosen, training=False, context=None)
  >>> batches = loading.batch(tf.data.Dataset.range(4), here)
  >>> whole = loading.finish(batches, here, lambda batch, seed: 2 * batch)
  >>> [batch.tolist() for batch in whole.as_numpy_iterator()]
  [[0, 2, 4], [6]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.data import options as options_lib
from tf_strategies.data import plan as plan_lib
from tf_strategies.data import service, shuffle, transform

_POLICIES = {'off': 'OFF', 'auto': 'AUTO', 'data': 'DATA', 'file': 'FILE'}
# (batch of examples, seed or None) -> element.
LoadFn = Callable[[Any, tf.Tensor | None], Any]


def shard(dataset: tf.data.Dataset, plan: plan_lib.Plan) -> tf.data.Dataset:
  """The examples of this pipeline out of a common order."""
  if not plan.shares_examples:
    return dataset
  return dataset.shard(plan.num_pipelines, plan.pipeline)


def batch(examples: tf.data.Dataset, plan: plan_lib.Plan) -> tf.data.Dataset:
  """The batches of an epoch."""
  return examples.batch(plan.batch_size, drop_remainder=plan.drop_remainder)


def finish(
  batches: tf.data.Dataset,
  plan: plan_lib.Plan,
  load_batch: LoadFn,
  needs_seeds: bool = False,
) -> tf.data.Dataset:
  """Loads the batches of an epoch in parallel, and prefetches.

  Args:
    batches: of an epoch, in its order.
    plan: of this pipeline.
    load_batch: makes an element of a batch.
    needs_seeds: whether each batch gets a seed.

  Raises:
    WorkerUnavailableError: the service of the options does not answer.
  """
  options = plan.options
  dataset = batches
  # After the batch, so that no batch mixes two epochs; before the map, so that
  # it runs on into the next epoch. Not in a service, whose workers would never
  # end an epoch in which the others have examples left.
  repeats = plan.training and options.repeat
  if repeats and options.service is None:
    dataset = dataset.repeat()
  if needs_seeds:
    dataset = tf.data.Dataset.zip(_seeds(plan), dataset)
    load = load_batch_with_seed(load_batch)
  else:
    load = lambda *batch: load_batch(unpack(batch), None)  # noqa: E731
  return in_parallel(dataset, load, options, repeats)


def in_parallel(
  batches: tf.data.Dataset,
  load: Callable[..., Any],
  options: options_lib.PipelineOptions,
  repeats: bool = False,
) -> tf.data.Dataset:
  """Maps `load` over batches, here or in a service, ahead of the step."""
  dataset = batches.map(
    load,
    num_parallel_calls=options.num_parallel_calls,
    deterministic=options.deterministic,
  )
  if options.service is not None:
    dataset = service.distribute(
      dataset, options.service, options.service_timeout
    )
    if repeats:
      dataset = dataset.repeat()
  if options.prefetch:
    dataset = dataset.prefetch(options.prefetch)
  chosen = tf.data.Options()
  chosen.deterministic = options.deterministic
  chosen.experimental_distribute.auto_shard_policy = getattr(
    tf.data.experimental.AutoShardPolicy, _POLICIES[options.autoshard]
  )
  return dataset.with_options(chosen)


def check_batches(plan: plan_lib.Plan, n: int) -> None:
  """Refuses a share that makes no batch.

  Raises:
    DataError: it has no example, or no full batch where these are wanted.
  """
  if not n:
    raise errors.DataError(
      f'input pipeline {plan.pipeline} of {plan.num_pipelines} has no example; '
      'expected at least one for each pipeline'
    )
  if plan.drop_remainder and n < plan.batch_size:
    raise errors.DataError(
      f'{n} examples make no full batch of {plan.batch_size} and '
      'drop_remainder=True; expected at least one, pass a smaller '
      'global_batch_size or drop_remainder=False'
    )


def load_batch_with_seed(load_batch: LoadFn) -> Callable[..., Any]:
  """Returns a function of (seed, batch) for a map."""
  return lambda seed, batch: load_batch(batch, seed)


def unpack(batch: tuple) -> Any:
  """The batch that a map's arguments are the components of."""
  return batch if len(batch) > 1 else batch[0]


def _seeds(plan: plan_lib.Plan) -> tf.data.Dataset:
  """A seed a batch, other ones in each epoch and pipeline; int64 [2]."""
  numbers = shuffle.random_numbers(plan.options.seed)
  pairs = numbers.batch(2, drop_remainder=True)
  return pairs.map(lambda p: transform.batch_seed(p, plan.context_pipeline))
