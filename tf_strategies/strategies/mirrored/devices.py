"""Turns a user's device list into full device names, or says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import _tf_internal, errors


def resolve_devices(
  devices: Sequence[str | tf.config.LogicalDevice] | None,
) -> tuple[str, ...]:
  """Returns the full names of `devices`.

  None means all GPUs, or all CPUs where there is no GPU. What
  `tf.config.list_logical_devices` returns is taken as well as names.

  Raises:
    UnsupportedOptionError: not a list of names, empty, a name that does not
      parse, a device that is not there, or one listed twice.

  Example:

    >>> resolve_devices(['CPU:0'])
    ('/job:localhost/replica:0/task:0/device:CPU:0',)
  """
  available = [
    d.name
    for d in tf.config.list_logical_devices()
    if d.device_type in ('CPU', 'GPU')
  ]
  if devices is None:
    gpus = [name for name in available if 'GPU' in name]
    devices = gpus or [name for name in available if 'CPU' in name]
  if isinstance(devices, str) or not isinstance(devices, Sequence):
    raise _unsupported(devices, "a list of device names such as ['GPU:0']")
  if not devices:
    raise _unsupported(devices, 'at least one device')
  devices = [
    d.name if isinstance(d, tf.config.LogicalDevice) else d for d in devices
  ]
  known = {_canonical(name) for name in available}
  resolved = []
  for device in devices:
    name = _canonical(device) if isinstance(device, str) else None
    if name is None:
      raise _unsupported(devices, f"names such as 'GPU:0', not {device!r}")
    if name not in known:
      raise _unsupported(
        devices, f'the devices of this process, without {device!r}: {available}'
      )
    if name in resolved:
      raise _unsupported(devices, f'each device once, not {device!r} twice')
    resolved.append(name)
  return tuple(resolved)


def _canonical(device: str) -> str | None:
  try:
    name = _tf_internal.resolve_device(device)
  except (ValueError, IndexError):
    return None
  return name if tf.DeviceSpec.from_string(name).device_type else None


def _unsupported(devices, allowed: str) -> errors.UnsupportedOptionError:
  return errors.UnsupportedOptionError(
    f'devices={devices!r}',
    allowed,
    'list tf.config.list_logical_devices(), or split one device into several '
    'with tf.config.set_logical_device_configuration before TensorFlow starts',
  )
