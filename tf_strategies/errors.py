"""Typed errors. A message says what was expected, what was given, and the fix.

`except tfs.errors.Error` catches all errors of this package and no others. Errors
about an argument are `ValueError`s too. Errors about the world outside (a lost peer, a
missed deadline) are `RuntimeError`s too. Code written for the standard types keeps
working.

Example:

  >>> from tf_strategies import errors
  >>> try:
  ...   raise errors.UnsupportedOptionError(
  ...       "strategy='ring_mirored'", 'one of the registered names',
  ...       "write 'ring_mirrored'")
  ... except ValueError as e:
  ...   print(e)
  Expected one of the registered names, got strategy='ring_mirored'. Fix: write 'ring_mirrored'.
"""


class Error(Exception):
  """Base of every error that tf_strategies raises on purpose.

  AutoGraph and Keras add a traceback to the message of an error that leaves
  traced code. They create a new error of the same type from one string, so no
  class here has its own `__init__`.
  """

  # AutoGraph keeps a type only if it has exactly this one.
  __init__ = Exception.__init__


class _MadeOfParts(type):
  """Combines three parts into the one message of an exception."""

  def __call__(cls, *args):
    if len(args) != 3:
      return super().__call__(*args)
    received, expected, fix = args
    error = super().__call__(
      f'Expected {expected}, got {received}. Fix: {fix}.'
    )
    error.received, error.expected, error.fix = args
    return error


def result_of(future):
  """Returns the result of a future, or raises its error.

  For an error of this package, the traceback begins here. The frames of the
  other thread do not help its user.
  """
  error = future.exception()
  if isinstance(error, Error):
    raise error.with_traceback(None)
  return future.result()


class UnsupportedOptionError(Error, ValueError, metaclass=_MadeOfParts):
  """An option, or a combination of options, that cannot give a right result.

  Args:
    received: the option and its value as the user writes them. Without the other
      arguments, the whole message.
    expected: the supported values, as a noun phrase.
    fix: the change that the user has to make, as an imperative. It may give the
      reason.
  """

  received: str | None = None
  expected: str | None = None
  fix: str | None = None


class ScopeError(UnsupportedOptionError, RuntimeError):
  """An object was made outside the scope of the strategy that uses it.

  It is also a `RuntimeError`, as TensorFlow's own error is.
  """


class UnsupportedVersionError(Error, ImportError):
  """A version of TensorFlow or Keras lacks an internal that this package needs."""


class ScheduleError(Error, ValueError):
  """An algorithm of collectives that does not fit the number of ranks."""


class DataError(Error, ValueError):
  """Input data that is missing, truncated or of the wrong kind."""


class StorageError(Error, OSError):
  """A checkpoint cannot be written or read, for example because the disk is full.

  It is also an `OSError`, with the `errno` of its cause.
  """

  # An `OSError` with an `errno` would show only that.
  __str__ = Exception.__str__


class CheckpointMismatchError(Error, ValueError):
  """A checkpoint that does not belong to this model or this run."""


class InUseError(Error, RuntimeError):
  """A live process of another run writes to the checkpoint directory."""


class TakenOverError(Error, RuntimeError):
  """Another run has taken over a checkpoint directory or the parameter servers."""


class ClusterConfigError(Error, ValueError):
  """A cluster description (TF_CONFIG and its relatives) that is malformed."""


class RendezvousError(Error, RuntimeError):
  """Workers did not find each other. The message names the missing ones."""


class JobFinishedError(RendezvousError):
  """A worker came after its job had finished, so nothing is left to train."""


class AuthenticationError(Error, RuntimeError):
  """A peer that could not prove that it knows the job's shared secret."""


class ResourceLimitError(Error, RuntimeError):
  """A limit of this process or host, such as that of open files, is reached."""


class WorkerUnavailableError(Error, RuntimeError):
  """A worker that died, closed its connection or no longer answers.

  Attributes:
    rank: rank of the worker, if known.
    address: address of the worker, 'host:port'.
  """

  rank: int | None = None
  address: str | None = None


class ParameterServerUnavailableError(Error, RuntimeError):
  """A parameter server died, and its variables are lost.

  Attributes:
    server: index of the server; None if unknown.
    address: address of the server, 'host:port'.
  """

  server: int | None = None
  address: str | None = None


class CollectiveTimeoutError(Error, RuntimeError):
  """A collective did not finish by its deadline, though all workers are alive.

  Attributes:
    rank: rank that the others waited for; None if unknown.
    tensor: name of the tensor.
    step: sequence number of the collective.
  """

  rank: int | None = None
  tensor: str | None = None
  step: int | None = None


class CollectiveMismatchError(Error, RuntimeError):
  """Workers disagree on a collective: its shape, dtype, order or value.

  Attributes:
    ranks: ranks that differ from rank 0.
  """

  ranks: tuple[int, ...] = ()


def __dir__() -> list[str]:
  # The classes.
  return [name for name in globals() if name[0].isupper()]
