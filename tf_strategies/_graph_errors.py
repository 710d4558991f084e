"""Errors that keep their type when they leave a graph, with readable messages.

TensorFlow turns every error that Python code raises inside a graph into an
`UnknownError` that holds its text. C++ makes that object from the class that it got
when TensorFlow was loaded. So only `UnknownError.__new__` can keep the type: it
returns the original error if the message carries the mark of `raise_through_graph`.
"""

import contextlib
import itertools
import os
import pathlib
import re
from typing import NoReturn

import tensorflow as tf

from tf_strategies import errors

# The newest errors, by the number in their message.
_host_failures: dict[str, BaseException] = {}
_MAX_HOST_FAILURES = 1000
_host_failure_numbers = itertools.count()
_HOST_FAILURE = re.compile(r'\[host failure (\d+)\]')

_FRAME = re.compile(r'\s*File "(.*)", line \d+, in ')
# Parts of the paths of files that the user did not write.
_NOT_THEIRS = (
  os.path.join('tensorflow', 'python', ''),
  os.path.join('keras', 'src', ''),
  os.path.join(str(pathlib.Path(__file__).parent), ''),
)
_OF_NO_USE = (
  'Additional GRPC error information',
  ':UNKNOWN:Error received',
  '<stack traces unavailable>',
)


def readable(error: tf.errors.OpError) -> tf.errors.OpError:
  """Returns the error with the lines of the user's own files, and the cause.

  TensorFlow also lists its own and Keras's calls, for each operation that
  failed, and every connection through which the error came.
  """
  lines: list[str] = []
  is_after_frame = False
  for line in error.message.splitlines():
    frame = _FRAME.match(line)
    is_theirs = frame and not any(part in frame[1] for part in _NOT_THEIRS)
    is_told = line in lines and (frame or line.startswith('Detected at'))
    is_gap = is_after_frame and not line.strip()
    is_after_frame = bool(frame) or is_gap
    if (frame is None or is_theirs) and not (
      is_told or is_gap or line.startswith(_OF_NO_USE)
    ):
      lines.append(line)
  return type(error)(error.node_def, error.op, '\n'.join(lines))


@contextlib.contextmanager
def typed():
  """Keeps the type of this package's errors through the graph, inside the context."""
  try:
    yield
  except errors.Error as e:
    raise_through_graph(e)


def raise_through_graph(error: errors.Error | tf.errors.OpError) -> NoReturn:
  """Raises `error` in a host call so that it keeps its type through the graph.

  It also becomes a `tf.errors.UnknownError`, as C++ requires.
  """
  number = str(next(_host_failure_numbers))
  _host_failures[number] = _as_unknown_error(error)
  while len(_host_failures) > _MAX_HOST_FAILURES:
    del _host_failures[next(iter(_host_failures))]
  tf.errors.UnknownError.__new__ = staticmethod(_new_unknown_error)
  # TensorFlow writes this to the log, with the errors that caused it.
  told = f'{type(error).__name__}: {error}'.partition('\n')[0]
  raise RuntimeError(f'{told} [host failure {number}]') from None


def _new_unknown_error(cls, *args, **kwargs):
  for arg in (*args, *kwargs.values()):
    found = isinstance(arg, str) and _HOST_FAILURE.search(arg)
    if found and found[1] in _host_failures:
      return _host_failures[found[1]]
  return Exception.__new__(cls, *args)


def _as_unknown_error(error):
  """Returns a copy of `error` that is also a `tf.errors.UnknownError`."""
  error_type = type(error)
  state = dict(vars(error))

  def ignore(self, *args, **kwargs):
    """Keeps the values, since TensorFlow initialises the error again."""

  typed = type(
    error_type.__name__,
    (error_type,)
    if isinstance(error, tf.errors.UnknownError)
    else (error_type, tf.errors.UnknownError),
    {
      '__init__': ignore,
      '__str__': error_type.__str__,
      # Pickles as the original class, because pickle cannot find this one by
      # name.
      '__reduce__': lambda self: (
        error_type.__new__,
        (error_type, *self.args),
        {'args': self.args, **state},
      ),
      '__module__': error_type.__module__,
    },
  )
  copy = error_type.__new__(typed, *error.args)
  tf.errors.UnknownError.__init__(copy, None, None, str(error))
  copy.args, copy.__traceback__ = error.args, error.__traceback__
  vars(copy).update(vars(error))
  return copy
