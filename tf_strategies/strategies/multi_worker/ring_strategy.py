"""`MultiWorkerRingStrategy`: replicas on several hosts, over a ring of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import cluster as cluster_lib
from tf_strategies import cross_device, errors, process_group
from tf_strategies.collectives import algorithms, codecs
from tf_strategies.strategies.mirrored import devices as devices_lib
from tf_strategies.strategies.mirrored import extended as mirrored_extended
from tf_strategies.strategies.multi_worker import extended as extended_lib
from tf_strategies.strategies.multi_worker import (
  process_group_communicator,
  strategy,
)


@dataclasses.dataclass(frozen=True)
class RingOptions:
  """How the workers of a `MultiWorkerRingStrategy` talk.

  Attributes:
    link: 'tcp', or 'mpi' for a job that `mpiexec` started.
    bucket_bytes: the most that a bucket of gradients holds. Buckets travel while
      the backward pass computes the next one.
    all_reduce: the algorithm between workers, a name in
      `tfs.collectives.ALGORITHMS`; 'auto' picks it by the size of a bucket.
    compression: what float gradients travel as, a name in
      `tfs.collectives.CODECS`. Sums are made in float32. 'bfloat16' and
      'float16' halve the bytes where the network is the limit, and cost
      precision (8 or 11 bits).
    group: rendezvous, secret and deadlines; None takes the secret from the
      environment.

  Raises:
    UnsupportedOptionError: an unknown link, algorithm or compression, or no
      bytes.
  """

  link: str = 'tcp'
  bucket_bytes: int = 8 << 20
  all_reduce: str = 'auto'
  compression: str = 'none'
  group: process_group.GroupOptions | None = None

  def __post_init__(self):
    if self.link not in ('tcp', 'mpi'):
      raise errors.UnsupportedOptionError(
        f'link={self.link!r}', "'tcp' or 'mpi'", "write link='tcp'"
      )
    if not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
      raise errors.UnsupportedOptionError(
        f'bucket_bytes={self.bucket_bytes!r}',
        'a positive number of bytes',
        'leave it out for 8 MiB',
      )
    algorithms.check(self.all_reduce, 'auto')
    codecs.get(self.compression)


class MultiWorkerRingStrategy(strategy.MultiWorkerStrategy):
  """Synchronous training on several workers, exactly, over a ring of our own.

  Every worker runs the same program. Variables are mirrored on all devices of
  all workers and start from the chief's values; gradients are added up on each
  worker's devices in the graph, then between workers by host calls that overlap
  with the backward pass. The result is one device's with the same global batch.

  A worker that dies, stops or is cut off ends in `WorkerUnavailableError` on
  every other; workers that do different things end in
  `CollectiveMismatchError`. `tfs.elastic.run` lets the others go on.

  Input: each worker gets its rows of the global batch, see
  `experimental_distribute_dataset`; Keras' `fit` does that by itself. All
  workers must have the same data in the same order, which is checked, or set
  the auto-shard policy FILE (files of its own for each) or OFF (data of its
  own for each).

  Nothing of TensorFlow's cluster runtime is started, although Keras takes it for
  a `tf.distribute.MultiWorkerMirroredStrategy`.

  Example, in a process without TF_CONFIG (one worker):

    >>> import tensorflow as tf
    >>> strategy = MultiWorkerRingStrategy(devices=['CPU:0'])
    >>> with strategy.scope():
    ...   model = tf.keras.Sequential([tf.keras.Input([3]),
    ...                                tf.keras.layers.Dense(1)])
    ...   model.compile('sgd', 'mse')
    >>> history = model.fit(tf.ones([8, 3]), tf.ones([8, 1]), verbose=0)

  Args:
    cluster: who takes part; None reads TF_CONFIG. A process group that has
      formed already is taken as it is.
    options: a `RingOptions`.
    devices: of this worker; default all GPUs, or the first CPU if there is none.
    cross_device_ops: what reductions between this worker's devices go through;
      default `AutoAllReduce()`.

  Raises:
    ClusterConfigError: TF_CONFIG is malformed.
    RendezvousError: not all workers came; names those that are missing.
    AuthenticationError: another secret than the other workers'.
    UnsupportedOptionError: devices or options that are not there.
    CollectiveMismatchError: workers with different numbers of devices.
  """

  def __init__(
    self,
    cluster: cluster_lib.ClusterConfig
    | process_group.ProcessGroup
    | None = None,
    options: RingOptions | None = None,
    devices: Sequence[str] | None = None,
    cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
  ):
    options = options or RingOptions()
    devices = devices_lib.resolve_devices(
      devices or devices_lib.default_devices()
    )
    self._collective_key_base = mirrored_extended.new_collective_key_base()
    group, self._rendezvous = cluster, None
    if not isinstance(cluster, process_group.ProcessGroup):
      group, self._rendezvous = _form_group(cluster, options)
    try:
      self._set_up(group, options, devices, cross_device_ops)
    except BaseException:
      # Nobody can close what was never made: the others would wait for this
      # worker, and its port would be taken for the next attempt.
      if group is not cluster:
        group.close()
      if self._rendezvous is not None:
        self._rendezvous.close()
      raise

  def _set_up(self, group, options, devices, cross_device_ops):
    """Becomes a strategy on `group`, if the other workers do the same."""

    def make_communicator(local):
      return process_group_communicator.ProcessGroupCommunicator(
        group,
        local,
        options.bucket_bytes,
        options.all_reduce,
        options.compression,
      )

    tf.distribute.Strategy.__init__(
      self,
      extended_lib.MultiWorkerExtended(
        self,
        devices,
        cross_device_ops or cross_device.AutoAllReduce(),
        make_communicator,
      ),
    )
    self._agree_on_start(
      {
        'devices of a worker': len(devices),
        'bucket_bytes': options.bucket_bytes,
        'all_reduce': options.all_reduce,
        'compression': options.compression,
      }
    )

  @staticmethod
  def place_in(
    cluster: cluster_lib.ClusterConfig | None,
  ) -> tuple[int, tuple[str, ...]]:
    """Returns this process's rank in `cluster` and the addresses of all that train.

    Raises:
      ClusterConfigError: the cluster has no part for this process.
    """
    return strategy.place_in(cluster, 'MultiWorkerRingStrategy')

  @property
  def process_group(self) -> process_group.ProcessGroup:
    """What links the workers."""
    return self.extended.communicator.group

  def close(self) -> None:
    """Leaves the other workers; a later collective of theirs fails."""
    super().close()
    if self._rendezvous is not None:
      self._rendezvous.close()


def _form_group(cluster, options):
  """Waits for the other workers and links up with them.

  Returns:
    The group, and what listens for workers that come later.
  """
  if options.link == 'mpi':
    return process_group.form_mpi_group(options.group), None
  if cluster is None:
    cluster = cluster_lib.ClusterConfig.from_env()
  rank, addresses = MultiWorkerRingStrategy.place_in(cluster)
  rendezvous = process_group.Rendezvous(
    dict(enumerate(addresses)),
    rank,
    options.group or process_group.GroupOptions.from_env(),
  )
  try:
    return rendezvous.form(), rendezvous
  except BaseException:
    rendezvous.close()
    raise
