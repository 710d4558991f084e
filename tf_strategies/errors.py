"""Typed errors. Each names the value, the expectation and the fix.

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
  strategy='ring_mirored' is not supported. Expected one of the registered names. Fix: write 'ring_mirrored'.
"""


class Error(Exception):
  """Base of every error that tf_strategies raises on purpose.

  AutoGraph and Keras put a traceback into the message of an error that leaves
  traced code: they make a new one of the same type from one string. Hence no
  class here has an `__init__` of its own.
  """

  # AutoGraph keeps a type only if it has exactly this one.
  __init__ = Exception.__init__


class _MadeOfParts(type):
  """Turns three parts into the one message that an exception is made of."""

  def __call__(cls, *args):
    if len(args) != 3:
      return super().__call__(*args)
    received, expected, fix = args
    error = super().__call__(
      f'{received} is not supported. Expected {expected}. Fix: {fix}.'
    )
    error.received, error.expected, error.fix = args
    return error


def result_of(future, seconds: float | None = None):
  """Returns the result of a future, or raises its error.

  The traceback of an error of this package then begins here: the frames of the
  thread that had it tell its user nothing.
  """
  error = future.exception(seconds)
  if isinstance(error, Error):
    raise error.with_traceback(None)
  return future.result()


class UnsupportedOptionError(Error, ValueError, metaclass=_MadeOfParts):
  """An option, or a combination of options, that cannot give a right result.

  Args:
    received: the option and its value as the user writes them. Without the other
      arguments, the whole message.
    expected: the supported values.
    fix: the change that the user has to make.
  """

  received: str | None = None
  expected: str | None = None
  fix: str | None = None


class ScopeError(UnsupportedOptionError, RuntimeError):
  """Something that was made outside of the scope of the strategy that uses it.

  A `RuntimeError` too, as TensorFlow's own.
  """


class UnsupportedVersionError(Error, ImportError):
  """A TensorFlow or Keras without something that this package relies on."""


class ScheduleError(Error, ValueError):
  """A communication schedule that does not compute an all-reduce."""


class DataError(Error, ValueError):
  """Input data that is missing, truncated or of the wrong kind."""


class StorageError(Error, OSError):
  """A checkpoint that cannot be written or read: a full disk, no permission.

  An `OSError` too, with the `errno` of its cause.
  """

  # An `OSError` with an `errno` would show that alone.
  __str__ = Exception.__str__


class LargeTableWarning(UserWarning):
  """A table of parameter servers comes whole into one process's memory."""


class CheckpointMismatchError(Error, ValueError):
  """A checkpoint that does not belong to this model or this run."""


class InUseError(Error, RuntimeError):
  """A checkpoint directory into which a live process of another run writes."""


class TakenOverError(Error, RuntimeError):
  """A checkpoint directory, or parameter servers, that another run has taken."""


class ClusterConfigError(Error, ValueError):
  """A cluster description (TF_CONFIG and its relatives) that is malformed."""


class RendezvousError(Error, RuntimeError):
  """Workers that did not find each other: says who is missing, and where."""


class JobFinishedError(RendezvousError):
  """A worker came when its job had been done: nothing is left to train."""


class AuthenticationError(Error, RuntimeError):
  """A peer that could not prove that it knows the job's shared secret."""


class ResourceLimitError(Error, RuntimeError):
  """A limit of this process or host, such as that of open files, is reached."""


class WorkerUnavailableError(Error, RuntimeError):
  """A worker that died, closed its connection or no longer answers.

  Attributes:
    rank: of the worker, where it is known.
    address: of the worker, 'host:port'.
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
