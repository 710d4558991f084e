"""Turns a user's device list into full device names, or raises a typed error."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import _tf_internal, option_checks

_FIX = (
  'list tf.config.list_logical_devices(), or split one device into several with '
  'tf.config.set_logical_device_configuration before TensorFlow starts'
)


def resolve_devices(
  devices: Sequence[str | tf.config.LogicalDevice] | None,
  option: str = 'devices',
) -> tuple[str, ...]:
  """Returns the full names of `devices`.

  None means all GPUs, or all CPUs if there is no GPU. The list may contain names, or
  devices from `tf.config.list_logical_devices`.

  Raises:
    UnsupportedOptionError: if it is not a list of names or is empty, or a name is not
      valid, does not exist or is listed twice.

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
    devices = [name for name in available if 'GPU' in name] or available

  def check(is_allowed, allowed):
    option_checks.check(is_allowed, f'{option}={devices!r}', allowed, _FIX)

  is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
  check(is_list, "a list of device names such as ['GPU:0']")
  check(devices, 'at least one device')
  devices = [
    d.name if isinstance(d, tf.config.LogicalDevice) else d for d in devices
  ]
  known = {_canonical(name) for name in available}
  resolved = []
  for device in devices:
    name = _canonical(device) if isinstance(device, str) else None
    check(name in known, f'devices among {available}')
    check(name not in resolved, 'each device once')
    resolved.append(name)
  return tuple(resolved)


def _canonical(device: str) -> str | None:
  try:
    name = _tf_internal.resolve_device(device)
  except (ValueError, IndexError):
    return None
  return name if tf.DeviceSpec.from_string(name).device_type else None
