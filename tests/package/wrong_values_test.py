"""Every public option rejects wrong values at once, with a message that names it."""

import inspect
import json
import os
import re
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case, virtual_devices
from tests.programs import common
from tf_strategies import data, monitoring, option_checks, process_group
from tf_strategies.cluster import job
from tf_strategies.launch import supervisor
from tf_strategies.strategies.parameter_server import options as servers

virtual_devices.configure()

_WITH_SERVERS = tfs.cluster.ClusterConfig(
  {'chief': ['a:1'], 'worker': ['b:1'], 'ps': ['c:1']}, 'chief', 0
)
_RANGE = tf.data.Dataset.range(4).batch(2)
_ROWS = tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.zeros([4, 1])))
_RECORDS = 'ram://wrong_values/a.tfrecord'

# Callable: its required arguments.
_CALLS = {
  tfs.RingMirroredStrategy: {},
  tfs.CentralStorageStrategy: {},
  tfs.MultiWorkerRingStrategy: {},
  tfs.MultiWorkerCollectiveStrategy: {},
  tfs.ParameterServerStrategy: {'cluster': _WITH_SERVERS},
  tfs.TPURingStrategy: {},
  tfs.create_strategy: {'name': 'one_device'},
  tfs.RingOptions: {},
  tfs.CollectiveOptions: {},
  tfs.ElasticOptions: {},
  process_group.GroupOptions: {},
  data.PipelineOptions: {'global_batch_size': 4},
  data.Arrays: {'components': np.ones([4])},
  data.Files: {
    'paths': _RECORDS,
    'read_fn': tf.data.TFRecordDataset,
    'parse_fn': tf.strings.length,
    'counts': [1],
  },
  data.TFRecords: {'paths': _RECORDS, 'schema': tf.strings.length},
  data.make_dataset: {
    'source': np.ones([4]),
    'options': data.PipelineOptions(4, seed=1),
    'training': True,
    'epochs': 2,
  },
  monitoring.TrainingMonitor: {},
  tfs.MonitorCallback: {},
  tfs.Run: {'directory': 'a', 'model': '<model>'},
  tfs.SidecarEvaluator: {
    'model': '<model>',
    'data': _ROWS,
    'checkpoint_dir': 'a',
  },
  tfs.ScheduledAllReduce: {'algorithm': 'ring'},
  tfs.elastic.run: {'train_fn': lambda job: None},
  tfs.cluster.run_task: {'train': lambda: None},
  tfs.cluster.ClusterConfig: {
    'jobs': {'worker': ['a:1']},
    'task_type': 'worker',
    'task_index': 0,
  },
  tfs.keras.ChiefOnly: {'callback': keras.callbacks.History()},
  tfs.keras.LazyRows: {'optimizer': 'adam'},
  tfs.keras.LocalSteps: {'optimizer': 'sgd', 'every': 2},
  tfs.keras.DynamicEmbedding: {'output_dim': 4},
}


# Argument: its name in the error message, if that differs.
_CALLED = {
  'name': 'strategy=|name=',
  'jobs': 'cluster is',
  'source': 'arrays with one row',
  'components': 'arrays with one row',
}


class _Nothing:
  """An object that is not a valid value of any option."""

  def __repr__(self):
    return '<nothing>'


def _named(calls):
  return [(call.__name__, call) for call in calls]


class WrongValuesTest(tf_case.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(os.environ))
    os.environ.pop('TF_CONFIG', None)
    with tf.io.TFRecordWriter(_RECORDS) as writer:
      writer.write(b'1')

  def resolved(self, value):
    """Returns the argument `value`. Creates a model if the argument is '<model>'."""
    if value != '<model>':
      return value
    model = common.linear(3, 1)
    model.compile('sgd', 'mse')
    return model

  def assert_refused(self, call, name, value):
    given = {
      k: self.resolved(v) if isinstance(v, str) else v
      for k, v in _CALLS[call].items()
    }
    with self.assertRaises(tfs.errors.Error) as caught:
      call(**{**given, name: value})
    text = str(caught.exception)
    # The argument `task_type` appears as `task.type` in TF_CONFIG.
    self.assertRegex(text, _CALLED.get(name, name.replace('_', '.')))
    if not isinstance(caught.exception, tfs.errors.ScheduleError):
      self.assertIn('Fix: ', text)

  @parameterized.named_parameters(_named(_CALLS))
  def test_value_of_wrong_type_is_refused(self, call):
    for parameter in inspect.signature(call).parameters.values():
      if parameter.kind is not parameter.VAR_KEYWORD:
        with self.subTest(parameter.name):
          self.assert_refused(call, parameter.name, _Nothing())

  @parameterized.named_parameters(_named(_CALLS))
  def test_bool_is_refused_for_a_number(self, call):
    for parameter in inspect.signature(call).parameters.values():
      kinds = set(re.findall(r'\w+', str(parameter.annotation)))
      if kinds & {'int', 'float'} and kinds <= {'int', 'float', 'None', 'str'}:
        with self.subTest(parameter.name):
          self.assert_refused(call, parameter.name, True)

  @parameterized.named_parameters(
    _named(call for call in _CALLS if call.__name__.endswith('Options'))
  )
  def test_numpy_numbers_become_python_numbers(self, call):
    given, numpys = dict(_CALLS[call]), {int: np.int64, float: np.float32}
    for name, parameter in inspect.signature(call).parameters.items():
      value = given.get(name, parameter.default)
      if type(value) in numpys:
        given[name] = numpys[type(value)](value)
    found = {k: v for k, v in vars(call(**given)).items() if k in given}
    self.assertNotEmpty(found)
    self.assertEqual(json.loads(json.dumps(found)), found)
    for name, value in found.items():
      self.assertAlmostEqual(value, given[name], msg=name)


class UnusableValuesTest(parameterized.TestCase):
  """Values of the right type that no job can use."""

  @parameterized.parameters(
    (tfs.CollectiveOptions, 'max_subdivs_per_device', -2),
    (tfs.CollectiveOptions, 'timeout_seconds', 10**400),
    (tfs.ElasticOptions, 'max_failures', -1),
    (process_group.GroupOptions, 'heartbeat_timeout_seconds', 0),
    (job.TaskCounts, 'num_ps', -1),
    (data.PipelineOptions, 'global_batch_size', 0),
    (data.PipelineOptions, 'seed', 2**63),
    (tfs.RingOptions, 'link', 'udp'),
    (servers.ParameterServerOptions, 'mode', np.array(['a', 'b'])),
    (supervisor.LaunchOptions, 'grace_period', float('nan')),
  )
  def test_unusable_value_is_refused(self, options, name, value):
    with self.assertRaises(tfs.errors.UnsupportedOptionError) as raised:
      options(**{**_CALLS.get(options, {}), name: value})
    error = raised.exception
    self.assertIn(name, error.received)
    self.assertTrue(error.expected)
    self.assertTrue(error.fix)
    # The fields of these classes are command-line flags.
    are_flags = options in (job.TaskCounts, supervisor.LaunchOptions)
    self.assertEqual('--' in error.received, are_flags)

  def test_refused_monitor_does_not_block_the_next_one(self):
    with self.assertRaises(tfs.errors.UnsupportedOptionError):
      tfs.monitoring.TrainingMonitor(3)
    tfs.monitoring.TrainingMonitor().close()

  def test_secret_passed_as_wrong_option_is_not_printed(self):
    with self.assertRaises(tfs.errors.UnsupportedOptionError) as raised:
      tfs.RingOptions(group=b'do not print this secret')
    self.assertNotIn('do not print', str(raised.exception))

  def test_range_limits(self):
    option_checks.check_int('n', 1, 1, 3)
    option_checks.check_int('n', 3, 1, 3)
    option_checks.check_seconds('s', 0, or_zero=True)
    for call in (
      lambda: option_checks.check_int('n', 0, 1, 3),
      lambda: option_checks.check_int('n', 4, 1, 3),
      lambda: option_checks.check_seconds('s', 0),
      lambda: option_checks.check_seconds('s', -1e-9, or_zero=True),
    ):
      with self.assertRaises(tfs.errors.UnsupportedOptionError):
        call()


if __name__ == '__main__':
  tf.test.main()
