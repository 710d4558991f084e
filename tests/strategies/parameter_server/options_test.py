"""What a parameter server strategy refuses, before it connects to anything."""

import json
import os
import pathlib
import time
from unittest import mock

import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers
from tf_strategies import errors
from tf_strategies.strategies.parameter_server import options as options_lib

_CLUSTER = {
  'chief': ['localhost:1'],
  'worker': ['localhost:2', 'localhost:3'],
  'ps': ['localhost:4'],
}


def _config(job='chief', index=0, **jobs) -> tfs.cluster.ClusterConfig:
  """The cluster, with other jobs in place; None leaves one out."""
  cluster = {k: v for k, v in {**_CLUSTER, **jobs}.items() if v is not None}
  return _config_of({'cluster': cluster, 'task': {'type': job, 'index': index}})


def _config_of(config) -> tfs.cluster.ClusterConfig:
  environ = {'TF_CONFIG': json.dumps(config)}
  return tfs.cluster.ClusterConfig.from_env(environ)


class OptionsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('unknown_mode', {'mode': 'asynchronous'}, "mode='asynchronous'.*'sync'"),
    ('mode_none', {'mode': None}, 'mode=None'),
    (
      'all_workers_backup',
      {'mode': 'sync', 'backup_workers': 2},
      'backup_workers=2 with 2 workers.*0 to 1',
    ),
    ('backup_negative', {'mode': 'sync', 'backup_workers': -1}, '=-1.*integer'),
    ('backup_float', {'mode': 'sync', 'backup_workers': 1.0}, '=1.0.*integer'),
    ('backup_none', {'mode': 'sync', 'backup_workers': None}, '=None.*integer'),
    ('backup_async', {'backup_workers': 1}, "mode='async'.*mode='sync'"),
    ('staleness_async', {'max_staleness': 3}, "mode='async'.*mode='bounded'"),
    (
      'staleness_negative',
      {'mode': 'bounded', 'max_staleness': -1},
      'max_staleness=-1.*at least 0',
    ),
    (
      'steps_without_directory',
      {'checkpoint_steps': 10},
      'checkpoint_steps=10 without checkpoint_dir',
    ),
    (
      'checkpoint_steps_zero',
      {'checkpoint_dir': '/tmp/x', 'checkpoint_steps': 0},
      'checkpoint_steps=0.*at least 1',
    ),
    ('directory_number', {'checkpoint_dir': 3}, 'checkpoint_dir=3'),
    (
      'checkpoint_dir_remote',
      {'checkpoint_dir': 'gs://bucket/run'},
      "checkpoint_dir='gs://bucket/run'.*file system of this machine",
    ),
    ('start_zero', {'start_timeout': 0}, 'start_timeout=0.*above 0'),
    ('step_inf', {'step_timeout': float('inf')}, 'step_timeout=inf'),
    ('recovery_negative', {'recovery_timeout': -1.0}, 'recovery_timeout=-1.0'),
    ('step_none', {'step_timeout': None}, 'step_timeout=None'),
    (
      'partitioner_number',
      {'variable_partitioner': 2},
      'variable_partitioner=2.*function',
    ),
  )
  def test_refused(self, given, message):
    for create in (
      tfs.ParameterServerStrategy,
      lambda **o: tfs.create_strategy('parameter_server', **o),
    ):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
        create(cluster=_config(), **given)

  @parameterized.parameters(
    ({'bakup_workers': 1}, "'bakup_workers'.*write 'backup_workers'"),
  )
  def test_name_that_is_none(self, given, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      tfs.create_strategy('parameter_server', cluster=_config(), **given)
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, next(iter(given))
    ):
      tfs.ParameterServerStrategy(cluster=_config(), **given)

  def test_refusals_name_value_allowed_and_way_out(self):
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      tfs.ParameterServerStrategy(cluster=_config(), mode='ssp')
    error = caught.exception
    self.assertEqual(error.received, "mode='ssp'")
    for mode in options_lib.MODES:
      self.assertIn(repr(mode), error.expected)
    self.assertNotEmpty(error.fix)

  def test_defaults(self):
    made = options_lib.make('async')
    self.assertEqual(made.mode, 'async')
    self.assertEqual(made.backup_workers, 0)
    self.assertIsNone(made.max_staleness)
    self.assertEqual(options_lib.make('bounded').max_staleness, 1)
    zero = options_lib.make('bounded', max_staleness=0)
    self.assertEqual(zero.max_staleness, 0)
    saving = options_lib.make('sync', checkpoint_dir=pathlib.Path('/x/y'))
    self.assertEqual(saving.checkpoint_dir, '/x/y')
    self.assertEqual(saving.checkpoint_steps, 1000)

  @parameterized.parameters(0, 1, 2)
  def test_fewer_backup_workers_than_workers_are_allowed(self, count):
    made = options_lib.make('sync', backup_workers=count)
    made.check_workers(3)
    self.assertEqual(made.backup_workers, count)


class ClusterTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(os.environ))
    os.environ.pop('TF_CONFIG', None)

  @parameterized.named_parameters(
    ('no_ps', {'ps': None}, 'no ps task'),
    ('no_worker', {'worker': None}, 'no worker task'),
    ('a_worker', {'job': 'worker', 'index': 1}, "'worker' 1 cannot coordinate"),
    ('a_server', {'job': 'ps'}, "'ps' 0 cannot coordinate"),
    (
      'an_evaluator',
      {'job': 'evaluator', 'evaluator': ['localhost:9']},
      "'evaluator' 0 cannot coordinate",
    ),
    (
      'gap_in_workers',
      {'worker': {0: 'localhost:2', 2: 'localhost:3'}},
      r"indices in cluster.worker is \['0', '2'\]",
    ),
    (
      'one_address_twice',
      {'ps': ['localhost:3']},
      'localhost:3',
    ),
    (
      'one_address_twice_in_a_job',
      {'ps': ['localhost:4', 'localhost:4']},
      'localhost:4',
    ),
  )
  def test_refused(self, changes, message):
    with self.assertRaisesRegex(errors.ClusterConfigError, message):
      tfs.ParameterServerStrategy(cluster=_config(**changes))

  def test_no_cluster_is_refused(self):
    with self.assertRaisesRegex(
      errors.ClusterConfigError, 'TF_CONFIG is not set.*one_device'
    ):
      tfs.ParameterServerStrategy()

  def test_without_a_cluster_the_registry_trains_on_one_device(self):
    strategy = tfs.create_strategy('parameter_server', mode='sync')
    self.assertIsInstance(strategy, tf.distribute.OneDeviceStrategy)
    self.assertEqual(strategy.num_replicas_in_sync, 1)

  @parameterized.named_parameters(
    ('not_json', '{', 'TF_CONFIG'),
    ('no_task', json.dumps({'cluster': _CLUSTER}), 'task'),
    (
      'index_out_of_range',
      json.dumps({'cluster': _CLUSTER, 'task': {'type': 'worker', 'index': 7}}),
      '7',
    ),
  )
  def test_bad_tf_config_is_refused(self, text, message):
    os.environ['TF_CONFIG'] = text
    with self.assertRaisesRegex(errors.ClusterConfigError, message):
      tfs.create_strategy('parameter_server')


def _start_all(configs):
  """Returns, for each cluster, the error about missing tasks and its delay."""
  found = []
  for config in configs:
    began = time.monotonic()
    try:
      tfs.ParameterServerStrategy(cluster=_config_of(config), start_timeout=2.0)
    except errors.RendezvousError as e:
      found.append((str(e), time.monotonic() - began))
  return found


class StartTimeoutTest(parameterized.TestCase):
  @pytest.mark.soak
  def test_missing_tasks_are_named_at_the_deadline(self):
    missing = [('worker', 1), ('ps', 1)]
    unknown = 'no-such-host.invalid:1'
    with parameter_servers.Job(2, 2, deadline=90, missing=missing) as job:
      one = {k: v[:1] for k, v in job.cluster.items()}
      clusters = (
        {**one, 'worker': job.cluster['worker']},
        {**one, 'ps': job.cluster['ps']},
        {**one, 'worker': job.cluster['worker'][1:], 'ps': [unknown]},
      )
      task = {'type': 'chief', 'index': 0}
      configs = [{'cluster': c, 'task': task} for c in clusters]
      found = job.run(_start_all, (configs,))
      worker, server = job.cluster['worker'][1], job.cluster['ps'][1]
    self.assertLen(found, len(configs))
    expected = (
      ('worker 1', worker),
      ('ps 1', server),
      ('worker 0', worker, 'ps 0', unknown),
    )
    for (message, seconds), names in zip(found, expected, strict=True):
      for name in names:
        self.assertIn(name, message)
      self.assertLess(seconds, 30)
    for message, _ in found[:2]:
      self.assertNotIn('worker 0', message)
      self.assertNotIn('ps 0', message)


if __name__ == '__main__':
  tf.test.main()
