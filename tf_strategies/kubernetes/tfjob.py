"""TFJob, kubeflow.org/v1: of Kubeflow's training operator, which is legacy.

The operator gives each task its TF_CONFIG and restarts it by its exit status.
It is in maintenance (release 1.9), and its successor runs no TensorFlow jobs;
where nothing is installed yet, choose a JobSet.

The operator takes unknown replica types and policies without a word and then
does nothing with them; `check_tfjob` refuses them.

Example:

  >>> from tf_strategies.kubernetes import options, tfjob
  >>> job = tfjob.tfjob(options.Options(image='mnist:1', num_ps=1), ['train'])
  >>> list(job['spec']['tfReplicaSpecs'])
  ['Chief', 'Worker', 'PS']
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tf_strategies import errors
from tf_strategies.kubernetes import options as options_lib
from tf_strategies.kubernetes import pods

API_VERSION = 'kubeflow.org/v1'

_REPLICA_TYPES = {
  'chief': 'Chief',
  'worker': 'Worker',
  'ps': 'PS',
  'evaluator': 'Evaluator',
}
_ALLOWED_TYPES = ('Chief', 'Master', 'Worker', 'PS', 'Evaluator')
_CLEAN_POD_POLICIES = ('All', 'Running', 'None')
_SUCCESS_POLICIES = ('', 'AllWorkers')


def tfjob(
  options: options_lib.Options, command: Sequence[str]
) -> dict[str, Any]:
  """A TFJob that runs `command` as every task."""
  counts = options.all_counts
  job = {
    'apiVersion': API_VERSION,
    'kind': 'TFJob',
    'metadata': pods.metadata(options, options.name),
    'spec': {
      # Without a chief the job would end with worker 0, and end the others.
      'successPolicy': '' if counts['chief'] else 'AllWorkers',
      'runPolicy': {
        # Parameter servers do not end by themselves.
        'cleanPodPolicy': 'Running',
        'backoffLimit': options.max_restarts * sum(counts.values()),
      },
      'tfReplicaSpecs': {
        _REPLICA_TYPES[task_type]: {
          'replicas': count,
          'restartPolicy': options.restart_policy,
          'template': {'spec': pods.pod_spec(options, task_type, command)},
        }
        for task_type, count in counts.items()
        if count
      },
    },
  }
  check_tfjob(job)
  return job


def check_tfjob(job: Any) -> None:
  """Refuses what the operator would reject late, or quietly ignore.

  Args:
    job: a TFJob as a dictionary, of ours or your own.

  Raises:
    UnsupportedOptionError: names the field and its value.
  """
  job = _mapping(job, 'a TFJob')
  _check(job, 'apiVersion', (API_VERSION,))
  _check(job, 'kind', ('TFJob',))
  options_lib.check_job_name(
    _mapping(job.get('metadata'), 'metadata').get('name')
  )
  spec = _mapping(job.get('spec'), 'spec')
  _check(spec, 'successPolicy', _SUCCESS_POLICIES, is_optional=True)
  run_policy = _mapping(spec.get('runPolicy', {}), 'spec.runPolicy')
  _check(run_policy, 'cleanPodPolicy', _CLEAN_POD_POLICIES, is_optional=True)
  replicas = _mapping(spec.get('tfReplicaSpecs'), 'spec.tfReplicaSpecs')
  _check_types(replicas)
  for replica_type, replica in replicas.items():
    _check_replica(replica_type, _mapping(replica, replica_type))


def _check_types(replicas: Mapping[str, Any]) -> None:
  for replica_type in replicas:
    if replica_type not in _ALLOWED_TYPES:
      raise errors.UnsupportedOptionError(
        f'the replica type {replica_type!r}',
        f'one of {", ".join(_ALLOWED_TYPES)}',
        'write it exactly so',
      )
  trains = {'Chief', 'Master', 'Worker'} & set(replicas)
  if not trains or {'Chief', 'Master'} <= set(replicas):
    raise errors.UnsupportedOptionError(
      f'a TFJob of {", ".join(replicas) or "nothing"}',
      'a Chief or a Master, but not both, or Workers, beside other tasks',
      'leave one of them out, or add Worker',
    )


def _check_replica(replica_type: str, replica: Mapping[str, Any]) -> None:
  _check(
    replica,
    'restartPolicy',
    options_lib.RESTART_POLICIES,
    f'{replica_type}.',
    is_optional=True,
  )
  count = replica.get('replicas', 1)
  is_single = replica_type in ('Chief', 'Master', 'Evaluator')
  if type(count) is not int or count < 1 or (is_single and count > 1):
    raise errors.UnsupportedOptionError(
      f'{replica_type}.replicas={count!r}',
      '1' if is_single else 'an integer of at least 1',
      'change it, or leave the type out',
    )
  template = _mapping(replica.get('template'), f'{replica_type}.template')
  spec = _mapping(template.get('spec'), f'{replica_type}.template.spec')
  containers = spec.get('containers')
  if not isinstance(containers, list):
    containers = []
  named = [
    container
    for container in containers
    if isinstance(container, Mapping)
    and container.get('name') == pods.CONTAINER
  ]
  if len(named) != 1:
    raise errors.UnsupportedOptionError(
      f'{replica_type} with {len(named)} containers named {pods.CONTAINER!r}',
      'one, by whose exit status the operator goes',
      f'name the container that trains {pods.CONTAINER!r}',
    )
  _check_container(replica_type, named[0])


def _check_container(replica_type: str, container: Mapping[str, Any]) -> None:
  if not container.get('image'):
    raise errors.UnsupportedOptionError(
      f'{replica_type} with image={container.get("image")!r}',
      'the name of an image',
      'add image to its container',
    )
  # Without any the operator adds its own.
  ports = container.get('ports') or []
  for port in ports if isinstance(ports, list) else [ports]:
    if not isinstance(port, Mapping):
      continue
    if port.get('name') == pods.PORT_NAME and port.get('containerPort') != (
      pods.PORT
    ):
      raise errors.UnsupportedOptionError(
        f'{replica_type} with {pods.PORT_NAME}={port.get("containerPort")!r}',
        f'{pods.PORT}, where this package listens',
        f'write containerPort: {pods.PORT}',
      )


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
  if isinstance(value, Mapping):
    return value
  raise errors.UnsupportedOptionError(
    f'{what}={value!r}', 'an object', 'see what --kind=tfjob writes'
  )


def _check(
  found: Mapping[str, Any],
  name: str,
  allowed: Sequence[str],
  prefix: str = '',
  is_optional: bool = False,
) -> None:
  value = found.get(name)
  if value in allowed or (value is None and is_optional):
    return
  raise errors.UnsupportedOptionError(
    f'{prefix}{name}={value!r}',
    ' or '.join(map(repr, allowed)),
    f'write {name}: {allowed[0]!r}',
  )
