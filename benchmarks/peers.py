"""The measured peers: our and TensorFlow's all-reduces, and a no-op."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_strategies import cross_device

OURS = 'ours'
BUILT_IN = 'built_in'
FLOOR = 'floor'


@dataclasses.dataclass(frozen=True)
class Peer:
  """One way to all-reduce the tensors of the replicas of one process.

  Attributes:
    name: name in tables and JSON.
    kind: OURS, BUILT_IN, or FLOOR for a step without a reduction.
    make_ops: creates the `CrossDeviceOps`. None uses the default of
      `tf.distribute.MirroredStrategy`.
    busiest_bytes_in: computes the bytes into the busiest device from the sizes of the
      tensors and the number of devices. None if the op counts them.
  """

  name: str
  kind: str
  make_ops: Callable[[], tf.distribute.CrossDeviceOps] | None = None
  busiest_bytes_in: Callable[[Sequence[int], int], int] | None = None


def for_devices(num_devices: int) -> tuple[Peer, ...]:
  """Returns every peer that can reduce over `num_devices` devices.

  Example:

    >>> [p.name for p in for_devices(4) if p.kind == BUILT_IN]
    ['ReductionToOneDevice', 'HierarchicalCopyAllReduce', 'default']
  """
  peers = [
    Peer('identity', FLOOR, busiest_bytes_in=lambda sizes, n: 0),
    Peer('AutoAllReduce', OURS, cross_device.AutoAllReduce),
    *(
      Peer(name, OURS, functools.partial(cross_device.ScheduledAllReduce, name))
      for name in (
        'direct',
        'ring',
        'halving_doubling',
        'hierarchical',
        'tree',
        'naive',
      )
    ),
    Peer(
      'ReductionToOneDevice',
      BUILT_IN,
      tf.distribute.ReductionToOneDevice,
      to_one_bytes_in,
    ),
  ]
  # It forms two groups of N // 2, which omits a device if N is odd.
  if num_devices % 2 == 0:
    peers.append(
      Peer(
        'HierarchicalCopyAllReduce',
        BUILT_IN,
        tf.distribute.HierarchicalCopyAllReduce,
        hierarchical_copy_bytes_in,
      )
    )
  # On CPUs this is TensorFlow's collective, a ring.
  peers.append(Peer('default', BUILT_IN, None, ring_bytes_in))
  return tuple(peers)


def to_one_bytes_in(sizes: Sequence[int], num_devices: int) -> int:
  """Returns the bytes into the device that computes all sums.

  Example:

    >>> to_one_bytes_in([100, 20], 4)
    360
  """
  return (num_devices - 1) * sum(sizes)


def ring_bytes_in(sizes: Sequence[int], num_devices: int) -> int:
  """Returns the bytes into each device of a balanced ring.

  Example:

    >>> ring_bytes_in([100, 20], 4)
    180
  """
  return 2 * (num_devices - 1) * sum(sizes) // num_devices


def hierarchical_copy_bytes_in(sizes: Sequence[int], num_devices: int) -> int:
  """Returns the bytes into the busiest device of TensorFlow's hierarchical copy.

  Device i modulo N adds up tensor i for its half of the devices, and the opposite
  device for the other half. The sum is copied back along the same paths.

  Example:

    >>> hierarchical_copy_bytes_in([100, 20], 4)
    220
  """
  group_size = num_devices // 2
  received = [0] * num_devices
  for i, size in enumerate(sizes):
    mains = {i % num_devices, (i + group_size) % num_devices}
    for device in range(num_devices):
      received[device] += size * (group_size if device in mains else 1)
  return max(received)
