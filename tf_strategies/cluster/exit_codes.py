"""What the exit status of a task tells whoever started it.

| status | meaning | a TFJob's policy ExitCode |
|---|---|---|
| 0 | done | done |
| 1 | an error of the program, its data or its options: it would come again | fails |
| 2 | a wrong command line | fails |
| 126, 127 | the command cannot be run, or was not found | fails |
| 143 | the world was at fault (`RESTARTABLE_EXIT_CODE`): start it again | restarts |
| 128 + N | killed by signal N: 137 out of memory, 143 preempted | restarts |

So a task that is evicted and one that only lost its peers end alike, and both
are started again. `exiting()` gives a program these statuses.

Example:

  >>> from tf_strategies import errors
  >>> from tf_strategies.cluster import exit_codes
  >>> exit_codes.exit_code(errors.WorkerUnavailableError('worker 1 died'))
  143
  >>> exit_codes.exit_code(errors.DataError('shard 3 is truncated'))
  1
"""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping

from tf_strategies import errors

# That of a process which SIGTERM ended: 128 + 15.
RESTARTABLE_EXIT_CODE = 143

# What a program of ours exits with where starting it again cannot help.
PERMANENT_EXIT_CODES = (1, 2, 126, 127)

# What a parameter server or a worker that serves exits with after SIGTERM. By
# default 0: whoever started it says that the job is done. Kubernetes ends pods
# for other reasons too, and would take 0 for the end of the work: its manifests
# say 143. So does the launcher, which does not ask once it ends the job itself.
TERMINATED_VARIABLE = 'TFS_TERMINATED_EXIT_CODE'

# The least status after which TFJobs of the policy ExitCode start a task again.
LEAST_RESTARTED = 128


def exit_code(error: BaseException) -> int:
  """What a process should exit with after `error`.

  Returns:
    `RESTARTABLE_EXIT_CODE` for those of our errors that report the world
    outside: a lost peer, a missed deadline. 1 for all others.
  """
  # A wrong secret stays wrong, and workers that disagree would do so again.
  lasting = (errors.AuthenticationError, errors.CollectiveMismatchError)
  is_of_the_world = isinstance(error, errors.Error) and isinstance(
    error, RuntimeError
  )
  if is_of_the_world and not isinstance(error, lasting):
    return RESTARTABLE_EXIT_CODE
  return 1


def is_restarted(status: int) -> bool:
  """Whether a scheduler starts a task again that ended with `status`.

  Example:

    >>> is_restarted(RESTARTABLE_EXIT_CODE), is_restarted(1)
    (True, False)
  """
  return status >= LEAST_RESTARTED


def terminated_exit_code(environ: Mapping[str, str] = os.environ) -> int:
  """What a server exits with when it is told to end.

  Raises:
    UnsupportedOptionError: TFS_TERMINATED_EXIT_CODE is no exit status.

  Example:

    >>> terminated_exit_code({})
    0
  """
  text = environ.get(TERMINATED_VARIABLE, '0')
  if not re.fullmatch('[0-9]{1,3}', text) or int(text) > 255:
    raise errors.UnsupportedOptionError(
      f'{TERMINATED_VARIABLE}={text!r}',
      'an exit status from 0 to 255',
      f'set {TERMINATED_VARIABLE}={RESTARTABLE_EXIT_CODE}, or unset it',
    )
  return int(text)


@contextlib.contextmanager
def exiting() -> Iterator[None]:
  """A context that ends the process with `exit_code(error)` after an error.

  The error is shown on stderr as usual. Put a program's whole `main` into it.

  Raises:
    SystemExit: with the status, in place of an error that was raised inside.

  Example:

    >>> with exiting():
    ...   result = 'trained'
  """
  try:
    yield
  except Exception as e:
    traceback.print_exc()
    sys.stderr.flush()
    raise SystemExit(exit_code(e)) from e
