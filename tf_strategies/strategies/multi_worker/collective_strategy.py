"""`MultiWorkerCollectiveStrategy`: on TensorFlow's own collective runtime."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import _tf_internal, cross_device, errors
from tf_strategies import cluster as cluster_lib
from tf_strategies.strategies.mirrored import devices as devices_lib
from tf_strategies.strategies.mirrored import extended as mirrored_extended
from tf_strategies.strategies.multi_worker import extended as extended_lib
from tf_strategies.strategies.multi_worker import runtime_communicator, strategy

# What the runtime of this process was started with; that happens only once.
_started: dict[str, tuple[str, ...]] = {}

_COMMUNICATIONS = ('auto', 'ring', 'nccl')


class MultiWorkerCollectiveStrategy(strategy.MultiWorkerStrategy):
  """Synchronous training on several workers, by TensorFlow's collectives.

  What `tf.distribute.MultiWorkerMirroredStrategy` is meant to be: Keras 3 `fit`,
  `evaluate` and `predict` work, uneven batches and clipping are exact (with
  `tfs.keras.DistributedOptimizer`), and large tensors travel in several parts
  at once. The choice for clusters with NCCL. With CPUs, or where workers may
  die, `MultiWorkerRingStrategy` is faster, and can go on.

  TensorFlow's cluster runtime is started when the strategy is made, so that
  must come before any TensorFlow op; a second strategy of the same process uses
  it too. It does not recover from a lost worker: restart all of them.

  The code path for NCCL has not been run on GPUs.

  Args:
    cluster: who takes part; None reads TF_CONFIG, and without one this process
      is alone.
    communication: 'auto' (NCCL between GPUs, else the ring), 'ring' or 'nccl'.
    max_subdivs_per_device: into how many parts a tensor may be cut; -1 for none,
      0 for TensorFlow's choice.
    devices: of this worker, such as 'CPU:0'; default all GPUs, or the first CPU.
    start_timeout_seconds: how long to wait for the other workers.
    timeout_seconds: how long one collective may take; 0 for no limit.
    bucket_bytes: the most that a bucket of small gradients holds.

  Raises:
    ClusterConfigError: TF_CONFIG is malformed, or has no part for this process.
    RendezvousError: not all workers came.
    UnsupportedOptionError: options or devices that are not there.
    CollectiveMismatchError: workers with different numbers of devices.
  """

  def __init__(
    self,
    cluster: cluster_lib.ClusterConfig | None = None,
    communication: str = 'auto',
    max_subdivs_per_device: int = 8,
    devices: Sequence[str] | None = None,
    start_timeout_seconds: float = 300.0,
    timeout_seconds: float = 0.0,
    bucket_bytes: int = 8 << 20,
  ):
    if communication not in _COMMUNICATIONS:
      raise errors.UnsupportedOptionError(
        f'communication={communication!r}',
        f'one of {_COMMUNICATIONS}',
        "write 'auto'",
      )
    if cluster is None:
      cluster = cluster_lib.ClusterConfig.from_env()
    self._collective_key_base = mirrored_extended.new_collective_key_base()
    rank, addresses = strategy.place_in(cluster, type(self).__name__)
    if len(addresses) > 1:
      _start_runtime(rank, addresses, start_timeout_seconds)
    devices = devices_lib.resolve_devices(
      devices or devices_lib.default_devices()
    )

    def make_communicator(local):
      return runtime_communicator.RuntimeCommunicator(
        rank,
        len(addresses),
        local.devices,
        self._collective_key_base,
        communication,
        max_subdivs_per_device,
        timeout_seconds,
        bucket_bytes,
      )

    tf.distribute.Strategy.__init__(
      self,
      extended_lib.MultiWorkerExtended(
        self, devices, cross_device.AutoAllReduce(), make_communicator
      ),
    )
    self._agree_on_start(
      {'devices of a worker': len(devices), 'bucket_bytes': bucket_bytes}
    )


def _start_runtime(rank, addresses, timeout_seconds):
  """Starts TensorFlow's server in this process and waits for the others."""
  if _started.get('addresses') == addresses:
    return
  resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec({'worker': list(addresses)}),
    task_type='worker',
    task_id=rank,
    rpc_layer='grpc',
  )
  try:
    _tf_internal.configure_coordination(
      '/job:worker/replica:0/task:0', len(addresses), timeout_seconds
    )
    # Made for what it starts: the server, and the collective runtime.
    tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
  except (tf.errors.OpError, RuntimeError) as e:
    raise errors.RendezvousError(
      f"TensorFlow's cluster runtime did not start on worker {rank} of "
      f'{list(addresses)} within {timeout_seconds:g} s: {e}. Start all workers, '
      'and make the strategy before anything else of TensorFlow.'
    ) from e
  _started['addresses'] = addresses
