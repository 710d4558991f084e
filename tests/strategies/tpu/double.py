"""A substitute for the metadata and the devices of a TPU.

TensorFlow's soft placement puts ops and variables for a TPU on the CPU.
Everything else is TensorFlow's own code: it builds programs for TPU replicas as
it would for a TPU.
"""

import dataclasses

import tensorflow as tf

import tf_strategies as tfs


@dataclasses.dataclass(frozen=True)
class Device:
  name: str
  device_type: str = 'TPU'


class ResolverDouble(tf.distribute.cluster_resolver.TPUClusterResolver):
  """Reports a TPU with `num_cores` cores."""

  def __init__(self, num_cores, is_initialized=True, num_devices=None):
    super().__init__('local')
    self._num_cores = num_cores
    self._num_devices = num_cores if num_devices is None else num_devices
    if is_initialized:
      # initialize_tpu_system sets this.
      self.set_tpu_topology(b'')

  def get_tpu_system_metadata(self):
    name = '/job:localhost/replica:0/task:0/device:TPU:{}'
    return tf.tpu.experimental.TPUSystemMetadata(
      num_cores=self._num_cores,
      num_hosts=1,
      num_of_cores_per_host=self._num_cores,
      topology=None,
      devices=tuple(Device(name.format(i)) for i in range(self._num_devices)),
    )


def create_strategy(num_replicas, **options):
  return tfs.TPURingStrategy(ResolverDouble(num_replicas), **options)
