"""Every options object rejects unusable values at once."""

import numpy as np
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from tf_strategies import option_checks
from tf_strategies.cluster import job
from tf_strategies.data import options as data
from tf_strategies.fault_tolerance import elastic_options
from tf_strategies.launch import supervisor
from tf_strategies.process_group import options as group
from tf_strategies.strategies.multi_worker import options as multi_worker
from tf_strategies.strategies.parameter_server import options as servers

_NAMES = np.array(['a', 'b'])
_COLLECTIVE = multi_worker.CollectiveOptions
_ELASTIC = elastic_options.ElasticOptions
_GROUP = group.GroupOptions
_JOB = job.TaskCounts
_PIPELINE = data.PipelineOptions
_RING = multi_worker.RingOptions
_SERVERS = servers.ParameterServerOptions
_SUPERVISOR = supervisor.LaunchOptions
# Required arguments, and the classes whose fields are command-line flags.
_OTHERS = {_PIPELINE: {'global_batch_size': 8}}
_FLAGS = (_JOB, _SUPERVISOR)


class OptionChecksTest(parameterized.TestCase):
  @parameterized.parameters(
    (_COLLECTIVE, 'max_subdivs_per_device', -2),
    (_COLLECTIVE, 'timeout_seconds', float('nan')),
    (_COLLECTIVE, 'timeout_seconds', 10**400),
    (_ELASTIC, 'batch', _NAMES),
    (_GROUP, 'heartbeat_timeout_seconds', 0),
    (_JOB, 'num_ps', -1),
    (_PIPELINE, 'seed', 2**63),
    (_RING, 'bucket_bytes', 0),
    (_RING, 'link', 'udp'),
    (_SERVERS, 'mode', _NAMES),
    (_SERVERS, 'step_timeout', 10**400),
    (_SUPERVISOR, 'grace_period', float('nan')),
  )
  def test_unusable_value_is_refused(self, options, name, value):
    arguments = {**_OTHERS.get(options, {}), name: value}
    with self.assertRaises(tfs.errors.UnsupportedOptionError) as raised:
      options(**arguments)
    error = raised.exception
    self.assertIn(name, error.received)
    self.assertTrue(error.expected)
    self.assertTrue(error.fix)
    self.assertEqual('--' in error.received, options in _FLAGS)

  def test_a_monitor_that_was_refused_is_not_in_the_way(self):
    with self.assertRaises(tfs.errors.UnsupportedOptionError):
      tfs.monitoring.TrainingMonitor(3)
    tfs.monitoring.TrainingMonitor().close()

  def test_secret_in_the_wrong_place_is_not_printed(self):
    with self.assertRaises(tfs.errors.UnsupportedOptionError) as raised:
      _RING(group=b'do not print this secret')
    self.assertNotIn('do not print', str(raised.exception))

  def test_ends_of_ranges(self):
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
  absltest.main()
