"""`MultiWorkerCollectiveStrategy`: on TensorFlow's own collective runtime."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import _tf_internal, cross_device, errors, option_checks
from tf_strategies import cluster as cluster_lib
from tf_strategies.cluster import config as config_lib
from tf_strategies.cluster import reachability
from tf_strategies.cross_device import links
from tf_strategies.strategies.multi_worker import options as options_lib
from tf_strategies.strategies.multi_worker import runtime_communicator, strategy

# Addresses with which this process's runtime started. It can start only once.
_started: dict[str, tuple[str, ...]] = {}


@option_checks.has_options
class MultiWorkerCollectiveStrategy(strategy.MultiWorkerStrategy):
  """Synchronous training on several workers, by TensorFlow's collectives.

  Unlike with `tf.distribute.MultiWorkerMirroredStrategy`, Keras 3 `fit`,
  `evaluate` and `predict` work, uneven batches and clipping are exact, and large
  tensors travel in several parts at once. Use it on clusters with NCCL; it has not
  been run on several GPUs. On CPUs, `MultiWorkerRingStrategy` is faster. It can also
  continue after a worker has died.

  The first strategy of a process starts TensorFlow's cluster runtime, so it must be
  created before any TensorFlow op runs. The runtime does not recover from a lost
  worker: restart all workers.

  Args:
    cluster: the workers; None reads TF_CONFIG. Without it, there is one worker.
    options: a `CollectiveOptions`.
    devices: devices of this worker, such as 'CPU:0'; by default all GPUs, or the
      first CPU.

  Raises:
    ClusterConfigError: TF_CONFIG is malformed, or has no part for this process.
    RendezvousError: a worker is missing, or this worker's port is taken.
    UnsupportedOptionError: a wrong option, a missing device, or NCCL without
      a physical GPU for each device.
    CollectiveMismatchError: workers have different numbers of devices.
  """

  def __init__(
    self,
    cluster: cluster_lib.ClusterConfig | None = None,
    options: options_lib.CollectiveOptions | None = None,
    devices: Sequence[str] | None = None,
  ):
    options = options_lib.CollectiveOptions() if options is None else options
    option_checks.check_type(
      'options',
      options,
      options_lib.CollectiveOptions,
      'CollectiveOptions',
      "write for instance CollectiveOptions(communication='ring')",
    )
    cluster = config_lib.given_or_from_env(cluster)
    rank, addresses = self.place_in(cluster)
    # Checked before this worker waits for the others.
    _communication(options, ['GPU:0'])
    if len(addresses) > 1:
      _start_runtime(rank, addresses, options.start_timeout_seconds)
    devices = strategy.resolve_devices(devices)
    communication = _communication(options, devices)
    options = dataclasses.replace(options, communication=communication)
    self._set_up(
      devices,
      cross_device.AutoAllReduce(),
      runtime_communicator.RuntimeCommunicator(
        rank, len(addresses), devices, options
      ),
      {'bucket_bytes': options.bucket_bytes, 'communication': communication},
      strategy.resolver_of(cluster),
    )


def _communication(
  options: options_lib.CollectiveOptions, devices: Sequence[str]
) -> str:
  """Returns the link of these devices: 'nccl' or 'ring'.

  For 'auto', TensorFlow chooses the ring even between GPUs, and for 'nccl'
  without a GPU. NCCL rejects two members on one GPU, but only after all have
  waited for each other.
  """
  is_usable = links.nccl_is_usable(devices)
  if options.communication == 'nccl' and not is_usable:
    raise errors.UnsupportedOptionError(
      f"communication='nccl' on devices {list(devices)}, with "
      f'{len(tf.config.list_physical_devices("GPU"))} physical GPUs',
      'a physical GPU for each device',
      "use communication='auto', which takes NCCL where that can be used, and "
      "'ring' for parts of a GPU",
    )
  if options.communication == 'auto':
    return 'nccl' if is_usable else 'ring'
  return options.communication


def _start_runtime(rank, addresses, timeout_seconds):
  """Starts TensorFlow's server in this process and waits for the others."""
  if _started.get('addresses') == addresses:
    return
  resolver = strategy.resolver_of_workers(addresses, rank)
  try:
    _tf_internal.configure_coordination(
      '/job:worker/replica:0/task:0', len(addresses), timeout_seconds
    )
    # Created only to start the server and the collective runtime.
    with reachability.serving(f'worker {rank}', addresses[rank]):
      tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
  except errors.RendezvousError:
    raise
  except (tf.errors.OpError, RuntimeError) as e:
    raise errors.RendezvousError(
      f"TensorFlow's cluster runtime did not start on worker {rank} of "
      f'{list(addresses)} within {timeout_seconds:g} s: {e}. Fix: start all '
      'workers, and make the strategy before anything else of TensorFlow.'
    ) from e
  _started['addresses'] = addresses
