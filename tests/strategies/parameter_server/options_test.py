"""What a parameter server strategy refuses, before it connects to anything."""

import os
from unittest import mock

import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers
from tf_strategies import errors

_CLUSTER = {
  'chief': ['localhost:1'],
  'worker': ['localhost:2', 'localhost:3'],
  'ps': ['localhost:4'],
}


def _config(job='chief', index=0, **jobs) -> tfs.cluster.ClusterConfig:
  """The cluster, with other jobs in place; None leaves one out."""
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
  def test_refused(self, given, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      tfs.ParameterServerStrategy(cluster=_config(), **given)


class ClusterTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('no_ps', {'ps': None}, 'one ps task .*got none'),
    ('no_worker', {'worker': None}, 'one worker task .*got none'),
    (
      'a_worker',
      {'job': 'worker', 'index': 1},
      "coordinator, got task 'worker' 1",
    ),
    (
      'an_evaluator',
      {'job': 'evaluator', 'evaluator': ['localhost:9']},
      "coordinator, got task 'evaluator' 0",
    ),
  )
  def test_refused(self, changes, message):
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


if __name__ == '__main__':
  tf.test.main()
