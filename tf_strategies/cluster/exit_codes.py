"""Exit statuses of tasks, by which schedulers and the launcher restart them.

| status | meaning | a TFJob's policy ExitCode |
|---|---|---|
| 0 | done, by this process or before it came | done |
| 1 | an error of the program or its data: it would recur | fails |
| 2 | a wrong command line, option or cluster | fails |
| 126, 127 | the command cannot be run, or was not found | fails |
| 143 | a lost peer, a deadline (`RESTARTABLE_EXIT_CODE`): start it again | restarts |
| 128 + N | killed by signal N: 137 out of memory, 143 preempted | restarts |

An evicted task and one that lost its peers are both started again. `exiting()`
gives a program these statuses.
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator

from tf_strategies import errors

# The status of a process that SIGTERM ended: 128 + 15. A server has it too: Kubernetes
# also ends servers that have not finished their work, and would take 0 for the end.
RESTARTABLE_EXIT_CODE = 143

_RESTARTABLE = (
  errors.RendezvousError,
  errors.WorkerUnavailableError,
  errors.ParameterServerUnavailableError,
  errors.CollectiveTimeoutError,
  # The other process may be one that is about to end.
  errors.InUseError,
)

# What a program of ours exits with where starting it again cannot help.
PERMANENT_EXIT_CODES = (1, 2, 126, 127)


def exit_code(error: BaseException) -> int:
  """Returns the exit status of a process after `error`.

  Example:

    >>> exit_code(errors.WorkerUnavailableError('worker 1 died'))
    143
    >>> exit_code(errors.DataError('shard 3 is truncated'))
    1
  """
  if isinstance(error, errors.JobFinishedError):
    return 0
  if isinstance(
    error, errors.UnsupportedOptionError | errors.ClusterConfigError
  ):
    return 2
  # A restart changes neither a wrong secret, nor a limit of the host, nor the
  # program. Workers that disagree would disagree again, and the run that has taken
  # over would be interrupted in its turn.
  return RESTARTABLE_EXIT_CODE if isinstance(error, _RESTARTABLE) else 1


@contextlib.contextmanager
def exiting() -> Iterator[None]:
  """Context that ends the process with `exit_code(error)` after an error.

  The traceback appears on stderr as usual. Wrap a program's whole `main` in it.
  """
  try:
    yield
  except Exception as e:
    traceback.print_exc()
    sys.stderr.flush()
    raise SystemExit(exit_code(e)) from e
