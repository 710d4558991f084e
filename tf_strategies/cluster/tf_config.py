"""Reads a TF_CONFIG, and checks that its parts fit together.

Schedulers differ: Kubeflow's TFJob lists the evaluator inside the cluster, writes
`"environment": "cloud"`, and sets nothing for a job of one replica.

Example:

  >>> from tf_strategies.cluster import tf_config
  >>> parts = tf_config.read({'cluster': {'chief': ['b:2222']},
  ...                         'task': {'type': 'chief', 'index': '0'}})
  >>> tf_config.checked(parts)[:3]
  ({'chief': ('b:2222',)}, 'chief', 0)
"""

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tf_strategies import option_checks
from tf_strategies.cluster import checks

_EXAMPLE = (
  'write {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": '
  '{"type": "worker", "index": 0}}, or unset TF_CONFIG to train in a single process'
)


class Parts(NamedTuple):
  """The fields of a `ClusterConfig`, as they were found: see `checked()`."""

  jobs: Mapping[str, Any]
  task_type: str
  task_index: int


def parse(text: str) -> dict[str, Any]:
  """Returns the JSON object that the text is."""
  try:
    config = json.loads(text, object_pairs_hook=_without_duplicates)
  # Beside JSONDecodeError: a repeated key, and a number of more digits than Python
  # converts.
  except ValueError as e:
    raise checks.bad(
      f'its text ({type(e).__name__}: {checks.show(str(e))})',
      text,
      'one JSON object',
      _EXAMPLE,
    ) from None
  if not isinstance(config, dict):
    raise checks.bad('its value', config, 'a JSON object', _EXAMPLE)
  return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  counts = collections.Counter(key for key, _ in pairs)
  for key, count in counts.items():
    if count > 1:
      # Of the two values one would be lost.
      raise ValueError(f'the key {checks.show(key)} is there twice')
  return dict(pairs)


def read(config: Mapping[str, Any]) -> Parts | None:
  """Takes the object of a TF_CONFIG apart.

  Returns:
    Its parts. None for a single process: neither a cluster nor a task is described.
  """
  _check_keys(config, 'a key', ('cluster', 'task'))
  if not {'cluster', 'task'} & set(config):
    return None
  task = config.get('task', checks.MISSING)
  if not isinstance(task, Mapping):
    raise checks.bad('task', task, 'an object with type and index', _EXAMPLE)
  _check_keys(task, 'a key of task', ('type', 'index'))
  return Parts(
    config.get('cluster', checks.MISSING),
    task.get('type', checks.MISSING),
    task.get('index', checks.MISSING),
  )


def _check_keys(
  config: Mapping[str, Any], what: str, known: tuple[str, str]
) -> None:
  """Names a key that is likely a misspelt one; schedulers add keys of their own."""
  spellings = {
    str(key).strip().lower(): key for key in config if key not in known
  }
  for key in known:
    likely = option_checks.nearest(key, spellings)
    if key not in config and likely:
      found = spellings[likely]
      raise checks.bad(what, found, ' and '.join(known), f"write '{key}'")


def checked(parts: Parts) -> Parts:
  """Returns the parts in the types of `ClusterConfig`. O(number of tasks).

  At most one task is a chief; addresses are well-formed and all different; the task is
  one of the cluster's, or an evaluator beside them.
  """
  if not isinstance(parts.jobs, Mapping):
    raise checks.bad(
      'cluster', parts.jobs, 'an object of lists of addresses', _EXAMPLE
    )
  jobs = {
    checks.checked_type(job, 'a job of cluster'): _tasks(job, tasks)
    for job, tasks in parts.jobs.items()
  }
  task_type = checks.checked_type(parts.task_type, 'task.type')
  task_index = checks.checked_index(parts.task_index, 'task.index')
  owners: dict[tuple[str, int], str] = {}
  for job, tasks in jobs.items():
    for index, address in enumerate(tasks):
      what = f'cluster.{job}[{index}]'
      owner = owners.setdefault(checks.split_address(address, what), what)
      if owner != what:
        raise checks.bad(
          what,
          address,
          f'an address that no other task has, but {owner} has it',
          'give every task a host or a port of its own',
        )
  if len(jobs.get('chief', [0])) > 1:
    raise checks.bad(
      'cluster.chief',
      jobs['chief'],
      'one chief',
      'keep one address and list the others as workers',
    )
  _check_task(jobs, task_type, task_index)
  return Parts(jobs, task_type, task_index)


def _tasks(job: str, tasks: Any) -> tuple[str, ...]:
  if isinstance(tasks, list | tuple) and tasks:
    return tuple(tasks)
  raise checks.bad(
    f'cluster.{job}',
    tasks,
    'a list of at least one address',
    f'list the addresses in brackets, such as ["host0:2222"], or leave {job} out',
  )


def _check_task(
  jobs: Mapping[str, Sequence[str]], task_type: str, task_index: int
) -> None:
  if task_type not in jobs:
    if task_type == 'evaluator':
      return
    raise checks.bad(
      'task.type',
      task_type,
      f'a job of the cluster ({", ".join(jobs)}), or evaluator',
      f'list the addresses of {task_type} in cluster as well',
    )
  count = len(jobs[task_type])
  if task_index >= count:
    raise checks.bad(
      'task.index',
      task_index,
      f'0 to {count - 1}, the tasks of {task_type} in cluster',
      'count from 0, or add the address of this task to cluster',
    )
