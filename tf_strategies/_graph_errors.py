"""Errors that leave a graph as what they were raised as, and say what is of use.

TensorFlow turns whatever Python code raises inside a graph into an
`UnknownError` that holds its text. C++ makes that object, by the class that it
was given when TensorFlow was loaded, so the one place where the type can be kept
is that class's `__new__`: it returns the original error if, and only if, the
message carries the mark that `raise_through_graph` put there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
from typing import NoReturn

import tensorflow as tf

from tf_strategies import _tf_internal, errors

# By the number that stands in the message; the newest.
_host_failures: dict[str, BaseException] = {}
_MAX_HOST_FAILURES = 1000
_host_failure_numbers = itertools.count()
_HOST_FAILURE = re.compile(r'\[host failure (\d+)\]')

_FRAME = re.compile(r'\s*File "(.*)", line \d+, in ')
# Of what the user has not written.
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
  """The same error without what its user cannot act on.

  TensorFlow says of each operation of a step by which calls it was made, once for
  each that failed, and of each connection by which the error came what it was. The
  lines of the user's own files are left, and what went wrong.
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
  """Lets an error of this package leave the host call, and the graph, as it is."""
  try:
    yield
  except errors.Error as e:
    raise_through_graph(e)


def raise_through_graph(error: errors.Error | tf.errors.OpError) -> NoReturn:
  """Raises `error` in a host call so that it leaves the graph as what it is.

  It becomes a `tf.errors.UnknownError` as well, since C++ insists on that.
  """
  number = str(next(_host_failure_numbers))
  _host_failures[number] = _as_unknown_error(error)
  while len(_host_failures) > _MAX_HOST_FAILURES:
    del _host_failures[next(iter(_host_failures))]
  if '__new__' not in vars(_tf_internal.UnknownError):
    _tf_internal.UnknownError.__new__ = staticmethod(_new_unknown_error)
  # TensorFlow writes this to the log, with whatever it follows from.
  told = f'{type(error).__name__}: {error}'.partition('\n')[0]
  raise RuntimeError(f'{told} [host failure {number}]') from None


def _new_unknown_error(cls, *args, **kwargs):
  for arg in (*args, *kwargs.values()):
    found = isinstance(arg, str) and _HOST_FAILURE.search(arg)
    if found and found[1] in _host_failures:
      return _host_failures[found[1]]
  return Exception.__new__(cls, *args)


def _restore(error_type, args, state):
  error = error_type.__new__(error_type, *args)
  error.args = args
  vars(error).update(state)
  return error


def _as_unknown_error(error):
  """A copy of `error` that is a `tf.errors.UnknownError` too."""
  error_type = type(error)
  state = dict(vars(error))

  def ignore(self, *args, **kwargs):
    """TensorFlow initialises anew what `__new__` returned."""

  typed = type(
    error_type.__name__,
    (error_type,)
    if isinstance(error, _tf_internal.UnknownError)
    else (error_type, _tf_internal.UnknownError),
    {
      '__init__': ignore,
      '__str__': error_type.__str__,
      # As what it was: the class of this object has no name to find it by.
      '__reduce__': lambda self: (_restore, (error_type, self.args, state)),
      '__module__': error_type.__module__,
    },
  )
  copy = error_type.__new__(typed, *error.args)
  copy.args, copy.__traceback__ = error.args, error.__traceback__
  of_unknown_error = {
    '_node_def': None,
    '_op': None,
    '_message': str(error),
    '_error_code': tf.errors.UNKNOWN,
    '_experimental_payloads': {},
  }
  vars(copy).update({**of_unknown_error, **vars(error)})
  return copy
