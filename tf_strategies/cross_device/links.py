"""Finds the physical GPUs of a process's devices, and the links between them."""

import re
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies.collectives import cost_model

# Cost of one copy, including TensorFlow's overhead. Measured on one H100. On
# another machine with GPUs  python -m benchmarks.gpu --parts=links  prints the
# lines for this table, and how far the choices are from the best.
LINKS = {
  # Measured between two parts of an H100, which share its memory. An H200 gave
  # 37e-6 and 6.7e-13.
  'one_gpu': cost_model.Link(34e-6, 1.1e-12),
  # Measured between the H100 and its host.
  'pcie': cost_model.Link(31e-6, 2.2e-11),
  # NOT MEASURED: the bandwidth is from the data sheet of NVLink 4 (450 GB/s one
  # way), and the latency is that measured for PCIe.
  'nvlink': cost_model.Link(31e-6, 1 / 450e9),
}
# TensorFlow does not report links. These are names of modules, which are made
# for NVLink. The same chip on a card has 'PCIe' in its name.
_NVLINK = re.compile(r'SXM|HBM3|NVL|H200|B[23]00')


def owners(devices: Sequence[str]) -> list[str | None]:
  """Returns the physical GPU of each device, or None for other devices.

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
  # TensorFlow numbers virtual GPUs in the order of their physical GPUs.
  return [
    gpu.name
    for gpu in tf.config.get_visible_devices('GPU')
    for _ in tf.config.get_logical_device_configuration(gpu) or [None]
  ]


def nccl_is_usable(devices: Sequence[str]) -> bool:
  """Returns whether every device is a whole physical GPU.

  NCCL rejects two devices on one GPU, and TensorFlow does not use it on virtual
  GPUs.
  """
  logical = _owners_of_logical_gpus()
  return all(logical.count(owner) == 1 for owner in owners(devices))


def packed_bytes(num_devices: int) -> tuple[int, int]:
  """Returns the least size of a tensor that parts of a GPU do not pack, and a pack's.

  A tree copies a tensor 2(N-1) times, which costs each of N devices 2(N-1)/N
  latencies. In a pack the tensor is copied twice more on each device, and the
  devices share one memory: 2N times its bytes. A pack as large as the second
  number takes half of its time to start.

  Example:

    >>> [size // 10**6 for size in packed_bytes(2)]
    [7, 30]
  """
  link = LINKS['one_gpu']
  bucket = link.alpha_seconds / link.beta_seconds_per_byte
  return int(bucket * (num_devices - 1) / num_devices**2), int(bucket)


def name_of(devices: Sequence[str]) -> str:
  """Returns the name in `LINKS` of the slowest link between the devices."""
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
