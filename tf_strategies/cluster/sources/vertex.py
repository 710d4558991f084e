"""Vertex AI: CLUSTER_SPEC, a TF_CONFIG in which jobs are worker pools.

The pools have fixed parts: 0 is the primary replica, 1 the workers, 2 the
parameter servers, 3 the evaluators. A job on one machine names its only task
chief. What Vertex AI says of the job itself (`job`, `environment`, `trial`) is
for others.

Example:

  >>> from tf_strategies.cluster.sources import vertex
  >>> parts = vertex.read({'CLUSTER_SPEC': '''{"cluster": {
  ...   "workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]},
  ...   "task": {"type": "workerpool1", "index": 1}, "environment": "cloud"}'''})
  >>> parts.jobs['chief'], parts.task_type, parts.task_index
  ({0: 'a:2222'}, 'worker', 1)
"""

from collections.abc import Mapping
from typing import Any

from tf_strategies.cluster import checks, tf_config

VARIABLE = 'CLUSTER_SPEC'

_TYPES = {
  'workerpool0': 'chief',
  'workerpool1': 'worker',
  'workerpool2': 'ps',
  'workerpool3': 'evaluator',
}


def read(environ: Mapping[str, str]) -> tf_config.Parts | None:
  """The cluster of CLUSTER_SPEC; None if it lists a single task."""
  if VARIABLE not in environ:
    return None
  spec = tf_config.parse(environ[VARIABLE])
  if tf_config.says_nothing(spec):
    return None
  # Also where it is one task: nobody else would find what is malformed.
  parts = tf_config.checked(tf_config.read(_translated(spec)))
  return None if sum(map(len, parts.jobs.values())) == 1 else parts


def _translated(spec: Mapping[str, Any]) -> dict[str, Any]:
  """`spec` with our types in place of the pools' names."""
  translated = dict(spec)
  cluster = spec.get('cluster')
  if isinstance(cluster, Mapping):
    translated['cluster'] = renamed = {}
    for name, tasks in cluster.items():
      job = _TYPES.get(name, name)
      if job in renamed:
        raise checks.bad(
          'cluster',
          sorted(cluster),
          f'one name for {job}',
          f'list its addresses under {name} alone',
        )
      # A pool that the job does not use.
      if tasks != [] or name not in _TYPES:
        renamed[job] = tasks
  task = spec.get('task')
  if isinstance(task, Mapping) and isinstance(task.get('type'), str):
    task_type = _TYPES.get(task['type'], task['type'])
    translated['task'] = {**task, 'type': task_type}
  return translated
