"""Runs the examples in this process, with flags as a user passes them."""

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
  """A context in which flags may be parsed, and devices are split already."""
  with (
    flagsaver.flagsaver(),
    mock.patch.object(
      common, 'split_device', lambda count: [f'CPU:{i}' for i in range(count)]
    ),
  ):
    yield


@contextlib.contextmanager
def parsed(name, *arguments):
  """A context in which an example has these flags; its module."""
  with flags_of_a_process():
    flags.FLAGS([name, *arguments])
    common.prepare_flags()
    yield _MODULES[name]


def as_flags(**values):
  """The command line with these flags; None leaves one out."""
  return [
    f'--{name}={str(value).lower() if isinstance(value, bool) else value}'
    for name, value in values.items()
    if value is not None
  ]


def run(name, *arguments, **values):
  """Runs an example with these flags; its report."""
  with parsed(name, *arguments, *as_flags(**values)) as example:
    return example.main()
