"""The measured peers: our all-reduces, TensorFlow's, and a no-op."""

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
    name: for tables and JSON.
    kind: OURS, BUILT_IN, or FLOOR for a step that reduces nothing.
    make_ops: makes the `CrossDeviceOps`; None leaves the choice to
      `tf.distribute.MirroredStrategy`.
    busiest_bytes_in: bytes into the busiest device by formula, of the tensors'
      sizes and the number of devices; None if the op itself knows.
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
  # It forms two groups of N // 2, so of an odd number it forgets one device.
  if num_devices % 2 == 0:
    peers.append(
      Peer(
        'HierarchicalCopyAllReduce',
        BUILT_IN,
        tf.distribute.HierarchicalCopyAllReduce,
        hierarchical_copy_bytes_in,
      )
    )
  # On CPUs TensorFlow's own collective, which is a ring.
  peers.append(Peer('default', BUILT_IN, None, ring_bytes_in))
  return tuple(peers)


def to_one_bytes_in(sizes: Sequence[int], num_devices: int) -> int:
  """Bytes into the device that adds everything up.

  Example:

    >>> to_one_bytes_in([100, 20], 4)
    360
  """
  return (num_devices - 1) * sum(sizes)


def ring_bytes_in(sizes: Sequence[int], num_devices: int) -> int:
  """Bytes into each device of a balanced ring.

  Example:

    >>> ring_bytes_in([100, 20], 4)
    180
  """
  return 2 * (num_devices - 1) * sum(sizes) // num_devices


def hierarchical_copy_bytes_in(sizes: Sequence[int], num_devices: int) -> int:
  """Bytes into the busiest device of TensorFlow's hierarchical copy.

  Tensor i is added up by device i modulo N for its own half, by the device
  half around from it for the other half, and copied back along the same ways.

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
