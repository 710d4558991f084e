"""Which physical GPUs the devices of a process are, and what links them."""

import re
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import collectives
from tf_strategies.cross_device import executor

# What one copy costs, by what it goes over. Only the ratio of the two numbers
# matters: it is the size at which a choice changes from latency to bandwidth.
# NONE WAS MEASURED BY THIS PROJECT: these are bandwidths of data sheets, and 10 us to
# start a copy. On a machine with GPUs
#
#   python -m benchmarks.gpu --parts=links
#
# prints the lines to put here, and how far from the best the choices are.
LINKS = {
  # Within one GPU: its memory, read and written (H100: 3.35 TB/s).
  'one_gpu': collectives.Link(10e-6, 1 / 1.5e12),
  # NVLink 4, one way: 450 GB/s.
  'nvlink': collectives.Link(10e-6, 1 / 450e9),
  # PCIe 3 x16.
  'pcie': collectives.Link(10e-6, 1 / 12e9),
}
# TensorFlow does not say what links GPUs. These names are of modules, which are
# made for NVLink; the same chip on a card has 'PCIe' in its name.
_NVLINK = re.compile(r'SXM|HBM3|NVL|H200|B[23]00')


def owners(devices: Sequence[str]) -> list[str | None]:
  """For each device the physical GPU that it is, or is a part of; else None.

  Example:

    >>> owners(['CPU:0'])
    [None]
  """
  numbered = dict(enumerate(_owners_of_logical_gpus()))
  specs = map(tf.DeviceSpec.from_string, devices)
  return [
    numbered.get(s.device_index or 0) if s.device_type == 'GPU' else None
    for s in specs
  ]


def _owners_of_logical_gpus() -> list[str]:
  # TensorFlow numbers them in the order of those that they are parts of.
  return [
    gpu.name
    for gpu in tf.config.get_visible_devices('GPU')
    for _ in tf.config.get_logical_device_configuration(gpu) or [None]
  ]


def nccl_is_usable(devices: Sequence[str]) -> bool:
  """Whether every device is a whole physical GPU.

  NCCL refuses two devices on one GPU. TensorFlow uses it on no part of one.
  """
  logical = _owners_of_logical_gpus()
  return all(logical.count(owner) == 1 for owner in owners(devices))


def are_one_memory(devices: Sequence[str]) -> bool:
  """Whether all devices are CPUs, or parts of one GPU.

  Then it counts how much is copied altogether, not how much over which link.
  """
  found = set(owners(devices))
  return executor.share_memory(devices) or (
    len(found) == 1 and None not in found
  )


def name_of(devices: Sequence[str]) -> str:
  """What the copies between devices go over at the slowest: a name in `LINKS`."""
  found = set(owners(devices))
  if None in found:
    return 'pcie'
  if len(found) == 1:
    return 'one_gpu'
  names = [
    tf.config.experimental.get_device_details(gpu).get('device_name', '')
    for gpu in tf.config.get_visible_devices('GPU')
    if gpu.name in found
  ]
  return 'nvlink' if all(map(_NVLINK.search, names)) else 'pcie'


def topology(devices: Sequence[str]) -> collectives.Topology:
  """What the cost model is told of devices."""
  return collectives.Topology(len(devices), LINKS[name_of(devices)])
