"""Where extract ends: decoded examples, kept after the first epoch.

Example:

  >>> import tensorflow as tf
  >>> from tf_strategies.data import decoded, files, options, plan
  >>> none = files.Files(name='numbers', paths=('-',), counts=(3,))
  >>> chosen = options.PipelineOptions(global_batch_size=2, cache='memory')
  >>> records = tf.data.Dataset.from_tensor_slices([b'1', b'20', b'300'])
  >>> kept = decoded.cache_examples(
  ...   records, none, plan.make(chosen, True, None), tf.strings.length, None)
  >>> [int(length) for length in kept]
  [1, 2, 3]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_strategies.data import cache, files, fingerprint, transform
from tf_strategies.data import plan as plan_lib


def cache_examples(
  records: tf.data.Dataset,
  mine: files.Files,
  plan: plan_lib.Plan,
  parse_fn: Callable[[tf.Tensor], Any],
  prepare_fn: transform.PrepareFn | None,
) -> tf.data.Dataset:
  """Decodes in batches and caches the examples one by one, as `options` say.

  Args:
    records: of the files, always in the same order.
    mine: the files of this pipeline.
    plan: of the pipeline.
    parse_fn: decodes a batch of records.
    prepare_fn: what a user's function in `parse_fn` is, if there is one.

  Raises:
    UnsupportedOptionError: as `cache.on_disk`.
    DataError: as `cache.on_disk`.
  """
  n = mine.num_records
  examples = records.batch(transform.PREPARE_BATCH).map(
    parse_fn,
    num_parallel_calls=plan.options.num_parallel_calls,
    deterministic=plan.reads_in_order,
  )
  # The cache, like the shuffle after it, works on examples: a cache of batches
  # would keep the same examples together for ever.
  examples = examples.unbatch()
  examples = examples.apply(tf.data.experimental.assert_cardinality(n))
  if plan.options.cache == 'memory':
    return examples.cache()
  paths = [os.path.abspath(path) for path in mine.paths]
  name = cache.name_of(
    plan.options.cache_path,
    mine.name,
    key=[
      plan.training,
      plan.pipeline,
      plan.num_pipelines,
      mine.selection,
      sorted(set(map(os.path.dirname, paths))),
    ],
    content=[
      paths,
      mine.counts,
      mine.identity,
      fingerprint.of_function(prepare_fn or parse_fn),
      fingerprint.of_graph(parse_fn, tf.TensorSpec([None], tf.string)),
    ],
  )
  return cache.on_disk(examples, name, n)
