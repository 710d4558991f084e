"""Simulated GPUs, for code that only reads the lists of devices."""

import contextlib
from unittest import mock

import tensorflow as tf


def names(count):
  return [
    f'/job:localhost/replica:0/task:0/device:GPU:{i}' for i in range(count)
  ]


@contextlib.contextmanager
def machine(*parts, device_name='NVIDIA H100 80GB HBM3'):
  """Makes TensorFlow list GPUs that are each split into `parts` virtual devices."""
  gpus = {f'/physical_device:GPU:{i}': count for i, count in enumerate(parts)}
  physical = [tf.config.PhysicalDevice(name, 'GPU') for name in gpus]

  def configuration(gpu):
    count = gpus[gpu.name]
    return (
      None if count == 1 else [tf.config.LogicalDeviceConfiguration()] * count
    )

  def list_devices(kind=None):
    return physical if kind == 'GPU' else []

  with (
    mock.patch.multiple(
      tf.config,
      list_physical_devices=list_devices,
      get_visible_devices=list_devices,
      get_logical_device_configuration=configuration,
    ),
    mock.patch.object(
      tf.config.experimental,
      'get_device_details',
      lambda gpu: {'device_name': device_name},
    ),
  ):
    yield
