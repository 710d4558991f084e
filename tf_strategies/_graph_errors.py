"""Errors that leave a graph as what they were raised as.

TensorFlow turns whatever Python code raises inside a graph into an
`UnknownError` that holds its text. C++ makes that object, by the class that it
was given when TensorFlow was loaded, so the one place where the type can be kept
is that class's `__new__`: it returns the original error if, and only if, the
message carries the mark that `raise_through_graph` put there.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import NoReturn

import tensorflow as tf

from tf_strategies import _tf_internal, errors

# By the number that stands in the message; the newest.
_host_failures: dict[str, BaseException] = {}
_MAX_HOST_FAILURES = 1000
_host_failure_numbers = itertools.count()
_HOST_FAILURE = re.compile(r'\[host failure (\d+)\]')


@contextlib.contextmanager
def typed():
  """Lets an error of this package leave the host call, and the graph, as it is."""
  try:
    yield
  except errors.Error as e:
    raise_through_graph(e)


def raise_through_graph(error: Exception) -> NoReturn:
  """Raises `error` in a host call so that it leaves the graph as what it is.

  It becomes a `tf.errors.UnknownError` as well, since C++ insists on that.
  """
  number = str(next(_host_failure_numbers))
  _host_failures[number] = _as_unknown_error(error)
  while len(_host_failures) > _MAX_HOST_FAILURES:
    del _host_failures[next(iter(_host_failures))]
  if '__new__' not in vars(_tf_internal.UnknownError):
    _tf_internal.UnknownError.__new__ = staticmethod(_new_unknown_error)
  raise RuntimeError(
    f'{type(error).__name__}: {error} [host failure {number}]'
  ) from error


def _new_unknown_error(cls, *args, **kwargs):
  for arg in (*args, *kwargs.values()):
    found = isinstance(arg, str) and _HOST_FAILURE.search(arg)
    if found and found[1] in _host_failures:
      return _host_failures[found[1]]
  return Exception.__new__(cls, *args)


def _restore(error_type, args, state):
  error = error_type(*args)
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
    (error_type, _tf_internal.UnknownError),
    {
      '__init__': ignore,
      '__str__': error_type.__str__,
      # As what it was: the class of this object has no name to find it by.
      '__reduce__': lambda self: (_restore, (error_type, self.args, state)),
      '__module__': error_type.__module__,
    },
  )
  copy = Exception.__new__(typed, *error.args)
  copy.args = error.args
  vars(copy).update(
    vars(error),
    _node_def=None,
    _op=None,
    _message=str(error),
    _error_code=tf.errors.UNKNOWN,
    _experimental_payloads={},
  )
  return copy
