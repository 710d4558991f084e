"""Without a usable TPU, the user gets a helpful error at once."""

import os
import socket
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from benchmarks import processes
from tests import tf_case
from tests.strategies.tpu import double, program
from tf_strategies.strategies.tpu import system

Resolver = tf.distribute.cluster_resolver.TPUClusterResolver

_DEADLINE_SECONDS = 120.0
_TPU_VARIABLES = ('TPU_NAME', 'KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS', 'TPU_CONFIG')


def environment(**variables):
  """Sets the environment to `variables`, without other variables that name a TPU."""
  kept = {k: v for k, v in os.environ.items() if k not in _TPU_VARIABLES}
  return mock.patch.dict(os.environ, {**kept, **variables}, clear=True)


class Failing(double.ResolverDouble):
  def get_tpu_system_metadata(self):
    raise RuntimeError('TPU cores on each host is not same')


class ResolverTest(tf_case.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(environment())

  @pytest.mark.smoke
  def test_missing_tpu_is_refused(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError,
      'TPU_NAME.*resolver=None .*names no TPU.*initialize_tpu_system',
    ):
      tfs.TPURingStrategy()

  def test_devices_option_is_refused(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, r"devices=\['TPU:0'\].*pass resolver"
    ):
      tfs.create_strategy('tpu_ring', devices=['TPU:0'])

  @parameterized.named_parameters(
    (
      'without_cores',
      lambda: Resolver('grpc://192.0.2.1:8470'),
      tfs.errors.UnsupportedOptionError,
      'without cores .*CPU:0.*experimental_connect_to_cluster.*ring_mirrored',
    ),
    (
      'not_initialized',
      lambda: double.ResolverDouble(8, is_initialized=False),
      tfs.errors.UnsupportedOptionError,
      '8 cores that was not initialised.*initialize_tpu_system',
    ),
    (
      'failing',
      lambda: Failing(8),
      tfs.errors.ClusterConfigError,
      'Failing.get_tpu_system_metadata.*RuntimeError: TPU cores on each host',
    ),
    (
      'inconsistent_metadata',
      lambda: double.ResolverDouble(8, num_devices=4),
      tfs.errors.ClusterConfigError,
      'got 8 cores with 4 names',
    ),
  )
  def test_unusable_resolver_raises(self, make, error, message):
    with self.assertRaisesRegex(error, message):
      tfs.TPURingStrategy(make())

  def test_import_does_not_look_for_a_tpu(self):
    """Checks that the import does not look for a TPU, even if one is configured."""
    code = (
      'import tf_strategies as tfs; tfs.TPURingStrategy; import sys; '
      "sys.exit('googleapiclient' in sys.modules)"
    )
    with environment(TPU_NAME='nowhere', GCE_METADATA_IP='192.0.2.1'):
      done = processes.run_python('-c', code)
    self.assertEqual(done.returncode, 0, done.stderr)

  def test_silent_metadata_server_has_a_deadline(self):
    server = socket.create_server(('127.0.0.1', 0))
    # Ends the thread that waits for an answer.
    self.addCleanup(server.close)
    address = f'127.0.0.1:{server.getsockname()[1]}'
    start = time.monotonic()
    with (
      mock.patch.object(system, '_QUERY_SECONDS', 0.5),
      environment(
        TPU_NAME='some-tpu', GCE_METADATA_IP=address, NO_PROXY='127.0.0.1'
      ),
      self.assertRaisesRegex(
        tfs.errors.ClusterConfigError,
        r'within 0\.5 seconds, got none.*zone',
      ),
    ):
      tfs.TPURingStrategy()
    self.assertLess(time.monotonic() - start, _DEADLINE_SECONDS)

  def test_strategy_inside_a_graph_is_refused(self):
    with (
      tf.Graph().as_default(),
      self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, 'eager mode.*inside a tf.Graph'
      ),
    ):
      double.create_strategy(2)


class TensorsTest(tf_case.TestCase):
  @parameterized.named_parameters(
    (
      'unknown_shape',
      lambda x: tf.boolean_mask(x, x > 0),
      r"tensor 'boolean_mask/.*:0' of shape \(None,\).*drop_remainder",
    ),
    ('bool', lambda x: x > 0, "'Greater.*dtype bool.*cast"),
  )
  def test_unsupported_tensor_is_refused(self, make, message):
    def step(x):
      return tf.distribute.get_replica_context().all_reduce('SUM', make(x))

    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      program.Program(
        double.create_strategy(2), step, [np.ones([2, 4], np.float32)]
      )

  def test_strategy_step_is_refused(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'strategy.step.*strategy.run'
    ):
      double.create_strategy(2).step(tf.reduce_sum)


if __name__ == '__main__':
  tf.test.main()
