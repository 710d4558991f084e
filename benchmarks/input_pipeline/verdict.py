"""Says in words which stage of a pipeline the others wait for.

The rules, in this order, on the numbers of `stages.Profile` alone:

1. The training step takes at least 85% of the time, but for the first batch of
   an epoch: it is the bottleneck.
2. Both the step and the wait for batches take at least a quarter, and nothing
   prefetches: they take turns, although they could overlap.
3. Otherwise the kind of stage that uses most of its threads' time, added up over
   its stages: extract, map, batch, shuffle, cache. Its threads wait for nothing
   while the others wait for it.
4. Unless that is less than 30%: then no stage is the bottleneck but what is
   between them, tf.data's cost of each element and each iterator.

Example:

  >>> import time
  >>> import tensorflow as tf
  >>> from benchmarks.input_pipeline import stages, verdict
  >>> def slow(x):
  ...   time.sleep(0.01)
  ...   return x
  >>> numbers = tf.data.Dataset.range(20).map(
  ...   lambda x: tf.numpy_function(slow, [x], tf.int64)
  ... )
  >>> verdict.judge(
  ...   stages.profile(numbers.batch(4), min_seconds=0)
  ... ).bottleneck
  'map'
"""

from __future__ import annotations

import dataclasses

from benchmarks.input_pipeline import stages as stages_lib

_TRAIN_BOUND = 0.85
_BOTH = 0.25
_NO_STAGE = 0.3
# Elements a step: those of a stage after the batch, partial epochs included.
_BATCHED = 1.5
_ADVICE = {
  'batch': 'use smaller elements, or batch(..., num_parallel_calls=...)',
  'shuffle': 'shuffle indices or records rather than decoded examples',
  'cache': 'cache fewer bytes, such as uint8 rather than float32',
  'other': 'look at this stage, or cache what comes out of it',
}


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Which part of a training loop is the bottleneck.

  Attributes:
    bottleneck: 'train', 'no overlap', 'extract', 'map', 'batch', 'shuffle',
      'cache', 'other' or 'overhead'.
    sentence: with what was measured, and what to try.
  """

  bottleneck: str
  sentence: str


def judge(profile: stages_lib.Profile) -> Verdict:
  """Judges a pipeline by what was measured.

  Args:
    profile: of at least one step.
  """
  # Of steps like most: an epoch of one batch has none.
  steady_s = profile.train_s + profile.fetch_s if profile.fetch_s else 0.0
  train = profile.train_s / (steady_s or profile.wall_s)
  fetch = profile.fetch_s / (steady_s or profile.wall_s)
  steps = max(1, profile.num_steps)
  train_ms = 1e3 * profile.train_s / steps
  fetch_ms = 1e3 * profile.fetch_s / steps
  if train >= _TRAIN_BOUND:
    return Verdict(
      'train',
      f'bound by the train step: {train_ms:.1f} of '
      f'{train_ms + fetch_ms:.1f} ms a step; the pipeline waits',
    )
  kinds = {stage.kind for stage in profile.stages}
  if train >= _BOTH and fetch >= _BOTH and 'prefetch' not in kinds:
    return Verdict(
      'no overlap',
      f'nothing overlaps: {fetch_ms:.1f} ms of preparation, then '
      f'{train_ms:.1f} ms of train step; try prefetch(tf.data.AUTOTUNE) at the '
      'end',
    )
  return _judge_stages(profile)


def _judge_stages(profile) -> Verdict:
  used: dict[str, float] = {}
  for stage in profile.stages:
    if stage.kind != 'prefetch':
      used[stage.kind] = used.get(stage.kind, 0.0) + stage.utilisation
  kind = max(used, key=lambda kind: used[kind], default='overhead')
  share = min(1.0, used.get(kind, 0.0))
  if share < _NO_STAGE:
    batch_ms = 1e3 * profile.wall_s / max(1, profile.num_steps)
    return Verdict(
      'overhead',
      f"bound by no stage's work ({kind} has most, {share:.0%} of its threads' "
      f'time), but by handing elements on: {batch_ms:.2f} ms a batch; try to '
      'batch first, so that fewer and larger elements pass',
    )
  members = [stage for stage in profile.stages if stage.kind == kind]
  busiest = max(members, key=lambda stage: stage.work_s)
  each = 1e3 * busiest.work_s / max(1, busiest.num_elements)
  count = busiest.threads
  threads = 'one thread' if count == 1 else f'{count} threads'
  return Verdict(
    kind,
    f'bound by {kind} ({share:.0%} busy): {busiest.name} takes {each:.3g} ms an '
    f'element, {threads}; try to {_advice(profile, busiest)}',
  )


def _advice(profile, stage) -> str:
  if stage.kind == 'map':
    words = ['cache']
    if stage.threads == 1:
      words.append('pass num_parallel_calls=tf.data.AUTOTUNE')
    # `MapAndBatch` yields batches, but maps what comes before.
    is_batched = stage.num_elements <= _BATCHED * profile.num_steps
    if not is_batched or 'AndBatch' in stage.name:
      words.append('batch before the map (vectorise)')
    return ', or to '.join(words)
  if stage.kind == 'extract':
    if 'Generator' in stage.name:
      return 'write the data to TFRecords: a Python generator runs alone'
    if stage.threads == 1:
      return (
        'interleave several files (interleave(..., num_parallel_calls=...)), '
        'or to cache'
      )
    return 'open more files at once, or to cache'
  return _ADVICE[stage.kind]
