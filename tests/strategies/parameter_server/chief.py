"""Runs many small programs in one chief, so that its start is paid for once."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tests import parameter_servers


class Programs:
  """What came out of programs that one chief ran one after the other.

  Args:
    job: whose chief runs them.
    programs: module functions by name; each runs whatever the others did.
    args: of all of them.
  """

  def __init__(
    self,
    job: parameter_servers.Job,
    programs: Mapping[str, Callable[..., Any]],
    args: Sequence[Any] = (),
  ):
    self._found = job.run(_run_all, (dict(programs), tuple(args)))

  def __getitem__(self, name: str) -> Any:
    """What a program returned; fails with its traceback if it raised."""
    value, error = self._found[name]
    if error:
      raise AssertionError(f'{name}: {error}')
    return value


def dense_model():
  """Six matrices of one size, each with a small bias."""
  layers = keras.layers
  return keras.Sequential(
    [layers.Input([20]), *(layers.Dense(50) for _ in range(6))]
  )


def matrix_bytes(variables):
  """Bytes of the matrices among `variables` on each of two servers."""
  load = [0, 0]
  for variable in variables:
    if variable.shape.rank == 2:
      device = tf.DeviceSpec.from_string(variable.device)
      assert device.job == 'ps', variable.device
      load[device.task] += variable.shape.num_elements() * 4
  return load


def _run_all(programs, args):
  found = {}
  for name, program in programs.items():
    try:
      found[name] = program(*args), ''
    except Exception:
      found[name] = None, traceback.format_exc()
  return found
