"""Pipelines whose bottleneck is known are really run, and judged."""

import time

import pytest
import tensorflow as tf
from absl.testing import parameterized

from benchmarks.input_pipeline import stages, verdict
from tests.data import formula
from tf_strategies import errors

_SLOW_S = 0.008


def _sleep(x):
  time.sleep(_SLOW_S)
  return x


def _slow(x):
  return tf.numpy_function(_sleep, [x], tf.int64)


def _plain(dataset):
  """Without the prefetch that TensorFlow appends."""
  options = tf.data.Options()
  options.experimental_optimization.inject_prefetch = False
  return dataset.with_options(options)


def _judge(dataset, **options):
  profile = stages.profile(dataset, min_seconds=0, **options)
  return profile, verdict.judge(profile)


@pytest.mark.soak  # They judge by the clock.
class RealPipelineTest(formula.DataTestCase):
  def test_slow_map(self):
    profile, found = _judge(tf.data.Dataset.range(60).map(_slow).batch(5))
    self.assertEqual(found.bottleneck, 'map', str(profile))
    for words in ('bound by map', 'one thread', 'AUTOTUNE', 'vectorise'):
      self.assertIn(words, found.sentence)
    self.assertEqual(profile.num_steps, 12)
    slow = max(profile.stages, key=lambda stage: stage.work_s)
    self.assertGreaterEqual(slow.work_s, 50 * _SLOW_S)

  def test_slow_parallel_map(self):
    dataset = tf.data.Dataset.range(80).map(_slow, num_parallel_calls=2)
    profile, found = _judge(dataset.batch(5))
    self.assertEqual(found.bottleneck, 'map', str(profile))
    self.assertIn('2 threads', found.sentence)
    self.assertNotIn('num_parallel_calls', found.sentence)

  def test_slow_generator(self):
    def generate():
      for i in range(40):
        yield _sleep(i)

    spec = tf.TensorSpec([], tf.int64)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    profile, found = _judge(dataset.batch(4))
    self.assertEqual(found.bottleneck, 'extract', str(profile))
    self.assertIn('TFRecords', found.sentence)

  def test_slow_consumer(self):
    dataset = tf.data.Dataset.range(60).batch(5).prefetch(1)
    profile, found = _judge(dataset, train_step_s=0.03)
    self.assertEqual(found.bottleneck, 'train', str(profile))
    self.assertIn('the pipeline waits', found.sentence)

  def test_preparation_and_step_in_turns(self):
    dataset = _plain(tf.data.Dataset.range(20).map(_slow))
    profile, found = _judge(dataset, train_step_s=_SLOW_S)
    self.assertEqual(found.bottleneck, 'no overlap', str(profile))
    self.assertIn('prefetch', found.sentence)

  def test_pipeline_without_a_model_is_refused(self):
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.range(3).with_options(options)
    with self.assertRaisesRegex(errors.DataError, 'autotune.enabled'):
      stages.profile(dataset)

  def test_endless_pipeline_is_watched_for_a_while(self):
    dataset = tf.data.Dataset.range(3).repeat()
    profile = stages.profile(dataset, max_seconds=0.2)
    self.assertGreater(profile.num_steps, 3)


def _stage(kind, utilisation, name=None, **changes):
  fields = {'work_s': utilisation, 'threads': 1, 'num_elements': 100}
  return stages.Stage(
    name or kind.title(), kind, utilisation=utilisation, **{**fields, **changes}
  )


def _profile(*found, train_s=0.0):
  return stages.Profile(found, 1.0, 10, fetch_s=1 - train_s, train_s=train_s)


class RulesTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('train', 0.85, [('map', 0.9)], 'train'),
    ('nearly_train', 0.84, [('map', 0.9), ('prefetch', 0.0)], 'map'),
    ('turns', 0.5, [('map', 0.5)], 'no overlap'),
    ('turns_with_prefetch', 0.5, [('map', 0.5), ('prefetch', 0.0)], 'map'),
    (
      'kinds_add_up',
      0.0,
      [('map', 0.4), ('batch', 0.3), ('batch', 0.2)],
      'batch',
    ),
    ('prefetch_is_no_stage', 0.0, [('map', 0.4), ('prefetch', 0.9)], 'map'),
    ('shuffle', 0.0, [('map', 0.4), ('shuffle', 0.5)], 'shuffle'),
    ('cache', 0.0, [('cache', 0.5)], 'cache'),
    ('other', 0.0, [('other', 0.5)], 'other'),
    ('nothing', 0.0, [('map', 0.29), ('extract', 0.2)], 'overhead'),
    ('no_stage', 0.0, [], 'overhead'),
  )
  def test_rule(self, train_s, kinds, expected):
    found = verdict.judge(
      _profile(*[_stage(*kind) for kind in kinds], train_s=train_s)
    )
    self.assertEqual(found.bottleneck, expected)

  def test_map_says_how_long_an_element_takes(self):
    found = verdict.judge(_profile(_stage('map', 0.31)))
    self.assertIn('Map takes 3.1 ms an element, one thread;', found.sentence)

  @parameterized.parameters(
    ('map', {}, ('cache', 'AUTOTUNE', 'vectorise'), ()),
    ('map', {'threads': 2}, ('2 threads', 'vectorise'), ('AUTOTUNE',)),
    ('map', {'num_elements': 10}, ('AUTOTUNE',), ('vectorise',)),
    ('extract', {}, ('interleave',), ()),
    ('extract', {'threads': 2}, ('more files',), ('interleave',)),
    ('extract', {'name': 'Generator'}, ('TFRecords',), ()),
    ('shuffle', {}, ('records rather than',), ()),
  )
  def test_advice(self, kind, changes, words, others):
    sentence = verdict.judge(_profile(_stage(kind, 0.9, **changes))).sentence
    for word in words:
      self.assertIn(word, sentence)
    for word in others:
      self.assertNotIn(word, sentence)


if __name__ == '__main__':
  tf.test.main()
