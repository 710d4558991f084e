"""`MultiWorkerRingStrategy`: several hosts, over TCP, shared memory or MPI."""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import cluster as cluster_lib
from tf_strategies import option_checks, process_group
from tf_strategies.cluster import config as config_lib
from tf_strategies.cluster import workers as workers_lib
from tf_strategies.process_group import reductions
from tf_strategies.strategies.mirrored import sharded_state
from tf_strategies.strategies.mirrored import strategy as mirrored_strategy
from tf_strategies.strategies.multi_worker import options as options_lib
from tf_strategies.strategies.multi_worker import (
  process_group_communicator,
  strategy,
)


@option_checks.has_options
class MultiWorkerRingStrategy(strategy.MultiWorkerStrategy):
  """Synchronous training on several workers, with one device's result.

  Every worker runs the same program. Variables are mirrored on all devices of
  all workers and start from the chief's values. The graph adds up the gradients of a
  worker's devices. The host then adds them up between workers, during the
  backward pass. The result equals one device's with the same global batch.
  TensorFlow's cluster runtime is not started.

  If a worker dies, stops or is cut off, every other worker raises
  `WorkerUnavailableError`; with `tfs.elastic.run` the others continue. If workers
  call different operations, they raise `CollectiveMismatchError`.

  Each worker takes its rows of the global batch. All workers must read the same
  data in the same order; some batches are compared. If not, set the auto-shard policy
  to FILE (each worker has its own files) or OFF (its own data).

  Example, in a process without TF_CONFIG (one worker):

    >>> import tensorflow as tf
    >>> strategy = MultiWorkerRingStrategy(devices=['CPU:0'])
    >>> with strategy.scope():
    ...   model = tf.keras.Sequential([tf.keras.Input([3]),
    ...                                tf.keras.layers.Dense(1)])
    ...   model.compile('sgd', 'mse')
    >>> history = model.fit(tf.ones([8, 3]), tf.ones([8, 1]), verbose=0)

  Args:
    cluster: the workers; None reads TF_CONFIG.
    options: a `RingOptions`.
    devices: devices of this worker; by default all GPUs, or the first CPU.
    cross_device_ops: all-reduce between this worker's devices; by default
      `AutoAllReduce()`.
    shard_optimizer_state: whether each replica stores a part of the optimizer's
      state, such as the moments of Adam (ZeRO, stage 1). Gradients are
      reduce-scattered, each replica updates its part, and updates are all-gathered.
      It applies to `fit` and `strategy.step`, not to `strategy.run`. Reading the
      state, as `model.save` does, is a collective: every worker has to read it.

  Raises:
    ClusterConfigError: TF_CONFIG is malformed.
    RendezvousError: the workers that it names are missing.
    AuthenticationError: this worker's secret differs from the other workers'.
    UnsupportedOptionError: a device does not exist, or an option is not supported.
    CollectiveMismatchError: workers have different numbers of devices.
  """

  def __init__(
    self,
    cluster: cluster_lib.ClusterConfig | None = None,
    options: options_lib.RingOptions | None = None,
    devices: Sequence[str] | None = None,
    cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
    shard_optimizer_state: bool = False,
  ):
    options = options_lib.RingOptions() if options is None else options
    option_checks.check_type(
      'options',
      options,
      options_lib.RingOptions,
      'tfs.RingOptions',
      "write for instance tfs.RingOptions(all_reduce='ring')",
    )
    cross_device_ops = mirrored_strategy.given_or_auto(cross_device_ops)
    option_checks.check_bool('shard_optimizer_state', shard_optimizer_state)
    devices = strategy.resolve_devices(devices)
    # If the constructor fails, the caller cannot close the group. The others would
    # wait for this worker, and its port would be taken in the next attempt.
    with contextlib.ExitStack() as opened:
      group, resolver = _form_group(cluster, options, opened)
      if shard_optimizer_state and options.all_reduce != 'auto':
        reductions.check_half(options.all_reduce, group.world_size)
      self._set_up(
        devices,
        cross_device_ops,
        process_group_communicator.ProcessGroupCommunicator(
          group, devices, cross_device_ops, options
        ),
        {
          **set_up_of(options),
          'shard_optimizer_state': bool(shard_optimizer_state),
        },
        resolver,
      )
      if shard_optimizer_state:
        extended = self.extended
        extended.state_shards = sharded_state.StateShards(extended)
      self._opened = opened.pop_all()

  @property
  def process_group(self) -> process_group.ProcessGroup:
    """Returns the process group of the workers."""
    return self.extended.communicator.group

  def close(self) -> None:
    """Leaves the other workers. Their later collectives fail."""
    super().close()
    self._opened.close()


def set_up_of(options: options_lib.RingOptions) -> dict[str, object]:
  """Returns the settings that must be equal on all workers, by name."""
  names = 'bucket_bytes', 'all_reduce', 'compression'
  return {name: getattr(options, name) for name in names}


def _form_group(cluster, options, opened):
  """Connects to the other workers. Returns the group, and describes the cluster.

  What must be closed is added to `opened`: the listener for later workers, too.
  """
  is_mpi = options.link == 'mpi'
  if not is_mpi:
    cluster = config_lib.given_or_from_env(cluster)
    is_mpi = (
      options.link == 'auto' and cluster is None and workers_lib.is_of_mpi()
    )
  if is_mpi:
    group = process_group.form_mpi_group(options.group)
    resolver = strategy.resolver_of_group(group)
  else:
    resolver = strategy.resolver_of(cluster)
    rank, addresses = MultiWorkerRingStrategy.place_in(cluster)
    rendezvous = process_group.Rendezvous(
      dict(enumerate(addresses)),
      rank,
      options.group or process_group.GroupOptions.from_env(),
    )
    opened.callback(rendezvous.close)
    group = rendezvous.form()
  opened.callback(group.close)
  return group, resolver
