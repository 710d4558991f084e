"""A parameter server strategy refuses invalid options before it connects."""

import os
import types
from unittest import mock

import hypothesis
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

import tf_strategies as tfs
from tests import docstrings, parameter_servers
from tf_strategies import errors
from tf_strategies.strategies.parameter_server import extended, partitioned

_CLUSTER = {
  'chief': ['localhost:1'],
  'worker': ['localhost:2', 'localhost:3'],
  'ps': ['localhost:4'],
}


def _config(job='chief', index=0, **jobs) -> tfs.cluster.ClusterConfig:
  """Returns the cluster with changed jobs. None removes a job."""
  cluster = {k: v for k, v in {**_CLUSTER, **jobs}.items() if v is not None}
  return tfs.cluster.ClusterConfig(cluster, job, index)


class OptionsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (
      'all_workers_backup',
      {'mode': 'sync', 'backup_workers': 2},
      '0 to 1 .*backup_workers=2 with 2 workers',
    ),
    ('backup_negative', {'mode': 'sync', 'backup_workers': -1}, 'integer.*=-1'),
    ('backup_async', {'backup_workers': 1}, "mode='async'.*mode='sync'"),
    ('staleness_async', {'max_staleness': 3}, "mode='async'.*mode='bounded'"),
    (
      'staleness_negative',
      {'mode': 'bounded', 'max_staleness': -1},
      'at least 0, got max_staleness=-1',
    ),
    (
      'steps_without_directory',
      {'checkpoint_steps': 10},
      'checkpoint_dir with .*checkpoint_steps=10 alone',
    ),
    (
      'checkpoint_steps_zero',
      {'checkpoint_dir': '/tmp/x', 'checkpoint_steps': 0},
      'at least 1, got checkpoint_steps=0',
    ),
    (
      'checkpoint_dir_remote',
      {'checkpoint_dir': 'gs://bucket/run'},
      "file system of this machine, got checkpoint_dir='gs://bucket/run'",
    ),
    ('start_zero', {'start_timeout': 0}, 'above 0, got start_timeout=0'),
  )
  def test_invalid_option_is_refused(self, given, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      tfs.ParameterServerStrategy(cluster=_config(), **given)


class ClusterTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('no_ps', {'ps': None}, 'one ps task .*got none'),
    ('no_worker', {'worker': None}, 'one worker task .*got none'),
    (
      'a_worker',
      {'job': 'worker', 'index': 1},
      "'chief', got task 'worker' 1",
    ),
    (
      'an_evaluator',
      {'job': 'evaluator', 'evaluator': ['localhost:9']},
      "'chief', got task 'evaluator' 0",
    ),
  )
  def test_invalid_cluster_is_refused(self, changes, message):
    with self.assertRaisesRegex(errors.ClusterConfigError, message):
      tfs.ParameterServerStrategy(cluster=_config(**changes))

  def test_no_cluster_is_refused(self):
    with (
      mock.patch.dict(os.environ, clear=True),
      self.assertRaisesRegex(
        errors.ClusterConfigError, 'TF_CONFIG is not set.*one_device'
      ),
    ):
      tfs.ParameterServerStrategy()


def _start():
  """Returns the error about missing tasks."""
  try:
    tfs.ParameterServerStrategy(start_timeout=2.0)
  except errors.RendezvousError as e:
    return str(e)
  return ''


class StartTimeoutTest(parameterized.TestCase):
  @pytest.mark.soak
  def test_missing_tasks_are_named_at_the_deadline(self):
    missing = [('worker', 1), ('ps', 1)]
    with parameter_servers.Job(2, 2, deadline=60, missing=missing) as job:
      message = job.run(_start)
    for name, index in missing:
      self.assertIn(f'{name} {index}', message)
      self.assertIn(job.cluster[name][index], message)
      self.assertNotIn(f'{name} 0', message)


class PlacementTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(extended, 'SPREAD_BYTES', 1))

  def test_examples_run(self):
    docstrings.assert_examples(self, partitioned.__name__, 2)

  @hypothesis.given(
    st.lists(st.integers(0, 10**9), max_size=40), st.integers(1, 7)
  )
  @pytest.mark.smoke
  def test_largest_load_is_at_most_mean_plus_largest_variable(self, sizes, n):
    found = extended.Placement(n)
    loads = [0] * n
    for size in sizes:
      loads[found.place([size], tf.uint8)] += size
    self.assertEqual(found.load, loads)
    self.assertLessEqual(max(loads), sum(sizes) / n + max(sizes, default=0))

  def test_scalars_are_always_on_server_0(self):
    found = extended.Placement(3)
    found.place([10**6], tf.uint8)
    self.assertEqual([found.place([], tf.float64) for _ in range(4)], [0] * 4)
    self.assertEqual(found.load, [10**6 + 32, 0, 0])


class PartitionTest(parameterized.TestCase):
  def num_parts(self, found, shape=(6, 4)):
    """Returns the number of parts if a partitioner returns `found`."""
    return extended.ParameterServerExtended._num_parts(
      types.SimpleNamespace(_partitioner=lambda shape, dtype: found),
      *(shape, 'float32', 'matrix'),
    )

  @parameterized.named_parameters(
    ('text', 'two', "'two'"),
    ('number', 2, 'got 2 from variable_partitioner'),
    ('zero', [0, 1], r'\[0, 1\]'),
    ('float', [2.0, 1], r'\[2.0, 1\]'),
    ('second_axis', [1, 2], r'first axis only, got \[1, 2\]'),
    ('too_short', [2], r'\[2\]'),
  )
  def test_invalid_result_of_a_partitioner_is_refused(self, found, message):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f"{message}.*'matrix'"
    ):
      self.num_parts(found)

  def test_parts_are_limited_by_rows(self):
    self.assertEqual(self.num_parts([100, 1]), 6)
    self.assertEqual(self.num_parts([2], shape=()), 1)


if __name__ == '__main__':
  tf.test.main()
