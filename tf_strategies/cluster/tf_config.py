"""Reads the text of TF_CONFIG into checked parts.

Who writes TF_CONFIG differs in what is written: Kubeflow's TFJob lists the
evaluator inside the cluster, writes `"environment": "cloud"`, gives sparse
workers (`{"worker": {"1": "host:2222"}}`) where workers come and go, and sets
nothing for a job of one replica.

Example:

  >>> from tf_strategies.cluster import tf_config
  >>> parts = tf_config.read({'cluster': {'worker': {'1': 'b:2222'}},
  ...                         'task': {'type': 'worker', 'index': '1'}})
  >>> parts.jobs, parts.is_sparse
  ({'worker': {1: 'b:2222'}}, True)
"""

import collections
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tf_strategies.cluster import checks


def _example() -> str:
  return (
    'write {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": '
    f'{{"type": "worker", "index": 0}}}}, or unset {checks.variable()} to '
    'train in a single process'
  )


class Parts(NamedTuple):
  """What a TF_CONFIG says, in the types of `ClusterConfig`."""

  jobs: dict[str, dict[int, str]]
  task_type: str
  task_index: int
  environment: str | None
  is_sparse: bool


def parse(text: str) -> dict[str, Any]:
  """The object that the text is."""
  config = parse_json(text, 'one JSON object', _example())
  if not isinstance(config, dict):
    raise checks.bad('its value', config, 'a JSON object', _example())
  return config


def parse_json(text: str, allowed: str, fix: str) -> Any:
  """The value that the text is.

  Args:
    text: JSON.
    allowed: what should be there, for the error.
    fix: what to write instead, for the error.
  """
  try:
    return json.loads(text, object_pairs_hook=_without_duplicates)
  # Beside JSONDecodeError: a number of more digits than Python converts, and
  # brackets nested deeper than its stack.
  except (_DuplicateKeyError, ValueError, RecursionError) as e:
    raise checks.bad(
      f'its text ({type(e).__name__}: {checks.show(str(e))})',
      text,
      allowed,
      fix,
    ) from None


class _DuplicateKeyError(Exception):
  """A key that an object has twice: of the two values one would be lost."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) != len(pairs):
    counts = collections.Counter(key for key, _ in pairs)
    twice = next(key for key, count in counts.items() if count > 1)
    raise _DuplicateKeyError(f'the key {checks.show(twice)} is there twice')
  return found


def says_nothing(config: Mapping[str, Any]) -> bool:
  """Whether neither a cluster nor a task is described: a single process."""
  if {'cluster', 'sparseCluster', 'task'} & set(config):
    return False
  for key in config:
    likely = str(key).strip().lower().rstrip('s')
    if likely in ('cluster', 'sparsecluster', 'task'):
      raise checks.bad('a key', key, 'cluster and task', f"write '{likely}'")
  return True


def read(config: Mapping[str, Any]) -> Parts:
  """Takes a TF_CONFIG apart; `ClusterConfig` checks what the parts hold.

  Args:
    config: what the JSON says.
  """
  if not isinstance(config, Mapping):
    raise checks.bad('its value', config, 'a JSON object', _example())
  jobs, is_sparse = _read_cluster(config)
  task = config.get('task', checks.MISSING)
  if not isinstance(task, Mapping):
    raise checks.bad('task', task, 'an object with type and index', _example())
  task_type = checks.checked_type(task.get('type', checks.MISSING), 'task.type')
  task_index = checks.checked_index(
    task.get('index', checks.MISSING), 'task.index'
  )
  return Parts(
    jobs, task_type, task_index, config.get('environment'), is_sparse
  )


def _read_cluster(
  config: Mapping[str, Any],
) -> tuple[dict[str, dict[int, str]], bool]:
  # Releases of the TFJob operator up to 1.4 say sparseCluster.
  key = 'cluster'
  if key not in config and 'sparseCluster' in config:
    key = 'sparseCluster'
  raw = config.get(key, checks.MISSING)
  if not isinstance(raw, Mapping):
    raise checks.bad(key, raw, 'an object of lists of addresses', _example())
  is_sparse = any(isinstance(tasks, Mapping) for tasks in raw.values())
  if is_sparse:
    # A job that this task need not know is {}, [], or null for a nil list of Go.
    raw = {
      job: t for job, t in raw.items() if t is not None and t not in ([], {})
    }
  return read_jobs(raw), is_sparse


def read_jobs(jobs: Mapping[str, Any]) -> dict[str, dict[int, str]]:
  """The addresses of each job by type and index; not yet the addresses.

  Args:
    jobs: by type a list of addresses, or an object of indices and addresses.
  """
  found: dict[str, dict[int, str]] = {}
  for name, tasks in jobs.items():
    job = checks.checked_type(name, 'a job of cluster')
    if job in found:
      raise checks.bad(
        'cluster',
        sorted(jobs),
        'a chief or a master, which are two names for one task',
        'leave master out and list it among the workers',
      )
    found[job] = _read_tasks(f'cluster.{name}', tasks)
  return found


def _read_tasks(what: str, tasks: Any) -> dict[int, str]:
  if isinstance(tasks, list | tuple):
    return dict(enumerate(tasks))
  if not isinstance(tasks, Mapping):
    raise checks.bad(
      what,
      tasks,
      'a list of addresses, or an object of indices and addresses',
      'write the addresses in brackets, such as ["host0:2222"]',
    )
  found: dict[int, str] = {}
  for index, address in tasks.items():
    number = checks.checked_index(index, f'an index of {what}')
    if number in found:
      raise checks.bad(
        f'an index of {what}', index, 'each index once', 'leave one of them out'
      )
    found[number] = address
  return found
