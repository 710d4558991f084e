"""Typed failures: each names the value, what is allowed and the way out.

Every error of this package derives from `Error`, so that `except tfs.errors.Error`
catches what the package itself refuses and nothing else. Those that reject
a user's argument are `ValueError`s too, those that report the world outside
(a lost peer, a missed deadline) are `RuntimeError`s, so that code written
against the standard types keeps working.

Example:

  >>> from tf_strategies import errors
  >>> try:
  ...   raise errors.UnsupportedOptionError(
  ...       "strategy='ring_mirored'", 'one of the registered names',
  ...       "write 'ring_mirrored'")
  ... except ValueError as e:
  ...   print(e)
  strategy='ring_mirored' is not supported: allowed is one of the registered names. Way out: write 'ring_mirrored'.
"""


class Error(Exception):
  """Base of every error that tf_strategies raises on purpose."""


class UnsupportedOptionError(Error, ValueError):
  """An option, or a combination of options, that cannot give a right result.

  Args:
    received: the option and its value, as the user would write it.
    allowed: what is supported instead.
    way_out: what to write to get what was meant.
  """

  def __init__(self, received: str, allowed: str, way_out: str):
    self.received = received
    self.allowed = allowed
    self.way_out = way_out
    super().__init__(
      f'{received} is not supported: allowed is {allowed}. Way out: {way_out}.'
    )


class ScheduleError(Error, ValueError):
  """A communication schedule that does not compute an all-reduce."""


class DataError(Error, ValueError):
  """Input data that is missing, truncated or not what was expected."""


class CheckpointMismatchError(Error, ValueError):
  """A checkpoint that does not belong to this model or this run."""


class ClusterConfigError(Error, ValueError):
  """A cluster description (TF_CONFIG and its relatives) that is malformed."""
