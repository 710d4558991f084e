"""Several logical CPUs in one process, for tests of in-process strategies.

pytest runs many modules in one process and TensorFlow fixes its devices when
it first runs an op, so every module asks for the same number at import:

  virtual_devices.configure_logical_cpus()
"""

import tensorflow as tf

DEFAULT_COUNT = 8


def configure_logical_cpus(count: int = DEFAULT_COUNT) -> None:
  """Makes sure that at least `count` logical CPUs exist; safe to repeat.

  Args:
    count: how many logical CPUs the calling module needs.

  Raises:
    RuntimeError: TensorFlow runs already, with fewer of them.
  """
  cpu = tf.config.list_physical_devices('CPU')[0]
  configured = tf.config.get_logical_device_configuration(cpu) or []
  if len(configured) >= count:
    return
  try:
    tf.config.set_logical_device_configuration(
      cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
  except RuntimeError as e:
    present = len(tf.config.list_logical_devices('CPU'))
    if present >= count:
      return
    raise RuntimeError(
      f'count ({count}) logical CPUs were asked for, but TensorFlow runs '
      f'already with {present}. Call configure_logical_cpus() when the module '
      'is imported, before any op runs, with the same count in every module '
      'of the process.'
    ) from e
