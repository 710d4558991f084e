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

A stage's time is waiting rather than computing as far as the process used less
CPU time than that: a lower bound, since other stages compute too.

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
  'shuffle': 'shuffle indices or records rather than decoded examples, or '
  'pass a smaller shuffle buffer',
  'cache': 'cache fewer bytes, such as uint8 rather than float32, or in memory',
  'other': 'look at this stage, or cache what comes out of it',
}


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Which part of a training loop is the bottleneck.

  Attributes:
    bottleneck: 'train', 'no overlap', 'extract', 'map', 'batch', 'shuffle',
      'cache', 'other' or 'overhead'.
    share: of the time that this part takes, or of its threads' time.
    sentence: with what was measured, and what to try.
  """

  bottleneck: str
  share: float
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
      train,
      f'bound by the train step: {train_ms:.1f} of '
      f'{train_ms + fetch_ms:.1f} ms a step; the pipeline waits',
    )
  kinds = {stage.kind for stage in profile.stages}
  if train >= _BOTH and fetch >= _BOTH and 'prefetch' not in kinds:
    return Verdict(
      'no overlap',
      fetch,
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
  batch_ms = 1e3 * profile.wall_s / max(1, profile.num_steps)
  if share < _NO_STAGE:
    return Verdict(
      'overhead',
      share,
      f"bound by no stage's work ({kind} has most, {share:.0%} of its threads' "
      f'time), but by handing elements on: {batch_ms:.2f} ms a batch; try to '
      'batch first, so that fewer and larger elements pass',
    )
  members = [stage for stage in profile.stages if stage.kind == kind]
  describe = {'extract': _extract, 'map': _map}.get(kind, _other)
  text = describe(profile, members)
  return Verdict(kind, share, f'bound by {kind} ({share:.0%} busy): {text}')


def _threads(members) -> tuple[int, str]:
  count = max(members, key=lambda stage: stage.work_s + stage.wait_s).threads
  return count, 'one thread' if count == 1 else f'{count} threads'


def _times(profile, members) -> tuple[float, float]:
  """Seconds of the stages, and how many of them are waiting at least."""
  total = sum(stage.work_s + stage.wait_s for stage in members)
  known = sum(stage.wait_s for stage in members)
  return total, max(known, total - profile.cpu_s, 0.0)


def _map(profile, members) -> str:
  busiest = max(members, key=lambda stage: stage.work_s)
  threads, words = _threads(members)
  total, waits = _times(profile, [busiest])
  is_batched = busiest.num_elements <= _BATCHED * profile.num_steps
  what = 'a batch' if is_batched else 'an element'
  each = total / max(1, busiest.num_elements)
  text = f'{_ms(each)} {what}, {words}'
  if waits > total / 2:
    text += f', at least {_ms(each * waits / total)} of it without computing'
  # `MapAndBatch` yields batches, but maps what comes before.
  if is_batched and 'AndBatch' not in busiest.name:
    advice = '; try to cache, or do less a batch'
    return (
      text
      + advice
      + (', or num_parallel_calls=tf.data.AUTOTUNE' if threads == 1 else '')
    )
  if threads == 1:
    return text + (
      '; try num_parallel_calls=tf.data.AUTOTUNE, batch before the map '
      '(vectorise), or cache'
    )
  return text + '; try to batch before the map (vectorise), or cache'


def _extract(profile, members) -> str:
  threads, words = _threads(members)
  total, waits = _times(profile, members)
  reader = max(
    members,
    key=lambda s: (s.name.startswith(('Sleep', 'TFRecord')), s.num_nodes),
  )
  files = profile.num_files or reader.num_nodes
  what = 'a file' if files > 1 else 'an epoch'
  each = total / max(1, files)
  if waits > total / 2:
    text = f'waits {_ms(each * waits / total)} of {_ms(each)} {what}, {words}'
  else:
    text = f'{_ms(each)} {what}, {words}'
  if any('Generator' in stage.name for stage in members):
    return text + '; a Python generator runs alone: write its data to TFRecords'
  if files > 1 and threads == 1:
    return text + (
      '; try to interleave files in parallel (interleave(..., '
      'num_parallel_calls=...)), or cache'
    )
  if files > 1:
    return text + '; try more parallel calls and a larger cycle, or cache'
  return text + '; try several files and a parallel interleave, or cache'


def _other(profile, members) -> str:
  busiest = max(members, key=lambda stage: stage.work_s)
  each = busiest.work_s / max(1, busiest.num_elements)
  return (
    f'{busiest.name} takes {_ms(each)} an element; try to '
    f'{_ADVICE[busiest.kind]}'
  )


def _ms(seconds: float) -> str:
  return f'{1e3 * seconds:.3g} ms'
