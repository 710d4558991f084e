"""Links a strategy to the other workers, and compares their values."""

import os
from collections.abc import Sequence
from typing import Any

from tf_strategies import errors, option_checks
from tf_strategies.cluster import config as config_lib

# The tag of the exchange in which workers meet before they train.
BEGIN_OF_FIT = 'begin of fit'
# Set by Open MPI, and by MPICH and its relatives (Intel MPI, MVAPICH).
_SIZES_OF_MPI = ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE')
# Whether a strategy of this process trains together with other tasks.
_has_joined = False
# Number of workers that differ from the first one and that an error names.
_NAMED = 4


def link_of(strategy: Any) -> Any | None:
  """Returns the `Communicator` of a `tf.distribute.Strategy`; None if it has none.

  Example:

    >>> import types
    >>> link = types.SimpleNamespace(communicator='the link')
    >>> link_of(types.SimpleNamespace(extended=link))
    'the link'
    >>> link_of(types.SimpleNamespace(extended=object()))
  """
  return getattr(strategy.extended, 'communicator', None)


def is_of_mpi() -> bool:
  """Returns whether MPI started several processes like this one, which train together."""
  # TF_CONFIG={} asks for a single process.
  if 'TF_CONFIG' in os.environ:
    return False
  sizes = [os.environ.get(name, '1') for name in _SIZES_OF_MPI]
  return any(size.isdecimal() and int(size) > 1 for size in sizes)


def note_joined() -> None:
  """Notes that a strategy of this process trains together with other tasks."""
  global _has_joined
  _has_joined = True


def check_alone(strategy: str) -> None:
  """Raises UnsupportedOptionError for a local strategy in a job of several tasks.

  Each task would train a model of its own, and nothing would say so. An evaluator may
  use one, and so may a program that has made the strategy of its job.

  Args:
    strategy: the name of the local strategy.
  """
  if _has_joined:
    return
  cluster = config_lib.ClusterConfig.from_env()
  where, meant = 'a process that MPI started', 'multi_worker_ring'
  is_several = cluster is None and is_of_mpi()
  if cluster is not None and cluster.training_index is not None:
    where = f'{cluster.task_type} {cluster.task_index}'
    is_several = len(cluster.training_tasks) > 1
    if 'ps' in cluster.jobs:
      meant = 'parameter_server'
  option_checks.check(
    not is_several,
    f'strategy={strategy!r} on {where} of a job with several tasks',
    f'a strategy that trains one model on all tasks, such as {meant!r}',
    f'write tfs.create_strategy({meant!r}); or start each task with '
    f'TF_CONFIG={{}}, and it trains a model of its own',
  )


def check_same(answers: Sequence[Any], what: str, fix: str) -> None:
  """Raises CollectiveMismatchError, with the ranks, unless all answers agree."""
  texts = list(map(str, answers))  # A nan equals no other.
  different = tuple(r for r, text in enumerate(texts) if text != texts[0])
  if different:
    shown = 0, *different[:_NAMED]
    said = [f'rank {r} has {texts[r]}' for r in shown]
    more = ', ...' if len(different) > _NAMED else ''
    error = errors.CollectiveMismatchError(
      f'Expected {what} to be the same on all workers: '
      f'{", ".join(said)}{more}. Fix: {fix}.'
    )
    error.ranks = different
    raise error
