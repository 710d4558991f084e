"""Runs the examples in this process with the flags of a user."""

import contextlib
import importlib
from unittest import mock

from absl import flags
from absl.testing import flagsaver

from examples import common

NAMES = ('mnist_keras_fit', 'mnist_custom_loop')


_MODULES = {name: importlib.import_module(f'examples.{name}') for name in NAMES}


@contextlib.contextmanager
def flags_of_a_process():
  """Allows flags to be parsed in a process whose devices are already split."""
  with (
    flagsaver.flagsaver(),
    mock.patch.object(
      common,
      'devices',
      lambda: [f'CPU:{i}' for i in range(flags.FLAGS.num_virtual_devices)],
    ),
  ):
    yield


@contextlib.contextmanager
def parsed(name, *arguments):
  """Sets the flags of an example and yields its module."""
  with flags_of_a_process():
    flags.FLAGS([name, *arguments])
    common.set_defaults()
    yield _MODULES[name]


def as_flags(**values):
  """Returns the command line for these flags. None omits a flag."""
  return [
    f'--{name}={str(value).lower() if isinstance(value, bool) else value}'
    for name, value in values.items()
    if value is not None
  ]


def run(name, *arguments, **values):
  """Runs an example with these flags and returns its report."""
  with parsed(name, *arguments, *as_flags(**values)) as example:
    return example.main()
