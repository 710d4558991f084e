"""The devices of the tests: several logical devices in one process.

All tests get the type and the names of their devices from this module. The
devices are logical CPUs. With `pytest --device=gpu` they are the GPUs of the
machine. If it has fewer than four, the first GPU is split into virtual GPUs.

pytest runs many modules in one process, and TensorFlow fixes its devices when
it runs the first op. Every module therefore asks for the same number at import:

  virtual_devices.configure()
  strategy = tfs.RingMirroredStrategy(virtual_devices.names(4))
"""

import os

import tensorflow as tf

DEFAULT_COUNT = 8
# 'CPU' or 'GPU'. An environment variable, so that child processes get it too.
VARIABLE = 'TFS_TEST_DEVICE'
KIND = os.environ.get(VARIABLE, 'cpu').upper()
# The host's device, independent of the test's devices.
HOST = 'CPU:0'
# Real GPUs are not split if there are enough for most tests.
_ENOUGH = 4
# Whether results are reproducible bit by bit. On GPUs this needs a TensorFlow
# setting.
IS_DETERMINISTIC = (
  KIND == 'CPU' or os.environ.get('TF_DETERMINISTIC_OPS') == '1'
)
# Memory of each virtual GPU. Several processes share one GPU.
_MEGABYTES = int(os.environ.get('TFS_TEST_GPU_MEGABYTES', '2048'))


def name(index: int) -> str:
  """Returns the name of a device, such as 'CPU:1'."""
  return f'{KIND}:{index}'


def names(count: int = DEFAULT_COUNT) -> list[str]:
  """Returns the names of the first `count` devices."""
  return [name(i) for i in range(count)]


def configure(count: int = DEFAULT_COUNT) -> None:
  """Ensures that at least `count` logical CPUs or GPUs exist. May be called again.

  On GPUs it disables TF32, whose products have only 10 bits.

  Args:
    count: number of devices that the calling module needs.

  Raises:
    RuntimeError: if TensorFlow already runs with fewer devices.
  """
  _split('CPU', count, {})
  if KIND == 'GPU':
    tf.config.experimental.enable_tensor_float_32_execution(False)
    physical = tf.config.list_physical_devices('GPU')
    if len(physical) < _ENOUGH:
      _split('GPU', count, {'memory_limit': _MEGABYTES})
    else:
      for gpu in physical:
        tf.config.experimental.set_memory_growth(gpu, True)


def server_config(computes: bool) -> tf.compat.v1.ConfigProto:
  """Returns the config of a `tf.distribute.Server`.

  If it `computes`, it gets a share of a GPU.
  """
  config = tf.compat.v1.ConfigProto()
  if computes and KIND == 'GPU':
    tf.config.experimental.enable_tensor_float_32_execution(False)
    config.gpu_options.experimental.virtual_devices.add(
      memory_limit_mb=[float(_MEGABYTES)]
    )
    config.gpu_options.visible_device_list = '0'
  else:
    config.device_count['GPU'] = 0
  return config


def _split(kind, count, options):
  physical = tf.config.list_physical_devices(kind)
  if not physical:
    raise RuntimeError(
      f'Expected a {kind} for {VARIABLE}={KIND.lower()}, got none. Fix: run the '
      'tests without --device.'
    )
  configured = tf.config.get_logical_device_configuration(physical[0]) or []
  if len(configured) >= count:
    return
  try:
    tf.config.set_logical_device_configuration(
      physical[0],
      [tf.config.LogicalDeviceConfiguration(**options) for _ in range(count)],
    )
  except RuntimeError as e:
    present = len(tf.config.list_logical_devices(kind))
    if present >= count:
      return
    raise RuntimeError(
      f'Expected {count} logical {kind}s, got {present} since TensorFlow already '
      'runs. Fix: call virtual_devices.configure() when the module is imported, '
      'before any op runs, with the same count in every module of the process.'
    ) from e
