"""The strategies in the table of programs, and the processes that they run in."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

import tf_strategies as tfs
from tests import virtual_devices

partitioners = tf.distribute.experimental.partitioners


@dataclasses.dataclass(frozen=True)
class Case:
  """A column of the table.

  Attributes:
    name: name of the case.
    create: function that makes the strategy in each process of the case.
    workers: number of processes besides the test; 0 runs in the test's process.
    servers: number of parameter servers. If not 0, the workers belong to them.
    link: how workers connect: 'tcp', or 'mpi' for workers that mpiexec starts.
    are_unlike: whether workers differ; see `processes.Workers`.
    is_stock: whether the strategy is TensorFlow's.
  """

  name: str
  create: Callable[[], tf.distribute.Strategy]
  workers: int = 0
  servers: int = 0
  link: str = 'tcp'
  are_unlike: bool = False
  is_stock: bool = False

  @property
  def layout(self):
    """Returns the properties that cases in the same processes share."""
    return self.workers, self.servers, self.link, self.are_unlike


def _in_process(name, strategy, devices=4, **options):
  devices = virtual_devices.names(devices)
  return Case(
    name, lambda: tfs.create_strategy(strategy, devices=devices, **options)
  )


def _workers(kind, workers, devices, link='tcp', sharded=False, **options):
  name = f'{"mpi" if link == "mpi" else kind}_{workers}x{devices}'
  name += '_unlike' * options.get('are_unlike', False) + '_sharded' * sharded

  def create():
    # Host calls run on the first device. Reversing the order makes it the
    # second.
    found = {'devices': virtual_devices.names(devices)[::-1]}
    if sharded:
      found['shard_optimizer_state'] = True
    if link != 'tcp':
      found['options'] = tfs.RingOptions(link=link)
    is_gpu = virtual_devices.KIND == 'GPU'
    if kind == 'collective' and is_gpu and workers > 1:
      # NCCL does not accept two workers on one GPU. It does run with one
      # worker.
      found['options'] = tfs.CollectiveOptions(communication='ring')
    return tfs.create_strategy(f'multi_worker_{kind}', **found)

  return Case(name, create, workers, link=link, **options)


def _servers(mode, workers=1, parts=1):
  name = f'servers_{mode}_{workers}' + f'_in_{parts}_parts' * (parts > 1)

  def create():
    partitioner = partitioners.FixedShardsPartitioner(parts)
    return tfs.ParameterServerStrategy(
      mode=mode, variable_partitioner=partitioner if parts > 1 else None
    )

  return Case(name, create, workers, servers=2)


STRATEGIES = (
  _in_process('ring_mirrored', 'ring_mirrored'),
  Case(
    'central_storage',
    # Not CPU:0, where TensorFlow puts ops without an explicit device.
    lambda: tfs.CentralStorageStrategy(
      virtual_devices.names(4), virtual_devices.name(1)
    ),
  ),
)
CASES = {
  case.name: case
  for case in (
    *STRATEGIES,
    _in_process('central_storage_of_2', 'central_storage', 2),
    _in_process('sharded', 'ring_mirrored', 3, shard_optimizer_state=True),
    _workers('ring', 2, 1),
    _workers('ring', 2, 2),
    _workers('ring', 3, 1),
    _workers('ring', 2, 1, are_unlike=True),
    _workers('ring', 2, 1, link='mpi'),
    _workers('ring', 2, 1, sharded=True),
    _workers('ring', 2, 2, sharded=True),
    _workers('ring', 3, 1, sharded=True),
    _workers('collective', 1, 1),
    _workers('collective', 2, 1),
    _workers('collective', 2, 2),
    _workers('collective', 2, 1, are_unlike=True),
    *(
      _servers(mode, workers, parts)
      for mode, workers in (
        ('async', 1),
        ('bounded', 1),
        ('sync', 1),
        ('sync', 2),
      )
      for parts in (1, 2)
    ),
    _servers('async', parts=3),
    Case(
      'MirroredStrategy',
      lambda: tf.distribute.MirroredStrategy(virtual_devices.names(4)),
      is_stock=True,
    ),
  )
}
