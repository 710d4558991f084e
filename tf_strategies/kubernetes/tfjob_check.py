"""What Kubeflow's operator would reject in a TFJob late, or quietly ignore.

It takes unknown replica types and policies without a word and then does nothing
with them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tf_strategies import option_checks
from tf_strategies.cluster.sources import roles
from tf_strategies.kubernetes import options as options_lib

API_VERSION = 'kubeflow.org/v1'
# The operator looks for these two names, and takes the port from there.
CONTAINER = 'tensorflow'
PORT_NAME = 'tfjob-port'
PORT = roles.DEFAULT_PORT

_REPLICA_TYPES = ('Chief', 'Master', 'Worker', 'PS', 'Evaluator')


def check_tfjob(job: Any) -> None:
  """Refuses what the operator would reject late, or quietly ignore.

  Args:
    job: a TFJob as a dictionary, of ours or your own.

  Raises:
    UnsupportedOptionError: names the field and its value.

  Example:

    >>> check_tfjob({'apiVersion': 'kubeflow.org/v1', 'kind': 'Job'})
    Traceback (most recent call last):
      ...
    tf_strategies.errors.UnsupportedOptionError: kind='Job' is not supported. ...
  """
  job = _mapping(job, 'a TFJob')
  _check(job, 'apiVersion', (API_VERSION,))
  _check(job, 'kind', ('TFJob',))
  metadata = _mapping(job.get('metadata'), 'metadata')
  options_lib.check_job_name(metadata.get('name'))
  spec = _mapping(job.get('spec'), 'spec')
  _check(spec, 'successPolicy', ('', 'AllWorkers', None))
  run_policy = _mapping(spec.get('runPolicy', {}), 'spec.runPolicy')
  _check(run_policy, 'cleanPodPolicy', ('All', 'Running', 'None', None))
  replicas = _mapping(spec.get('tfReplicaSpecs'), 'spec.tfReplicaSpecs')
  for replica_type in replicas:
    option_checks.check(
      replica_type in _REPLICA_TYPES,
      f'the replica type {replica_type!r}',
      f'one of {", ".join(_REPLICA_TYPES)}',
      'write it exactly so',
    )
  trains = {'Chief', 'Master', 'Worker'} & set(replicas)
  option_checks.check(
    trains and not {'Chief', 'Master'} <= trains,
    f'a TFJob of {", ".join(replicas) or "nothing"}',
    'a Chief or a Master, but not both, or Workers, beside other tasks',
    'leave one of them out, or add Worker',
  )
  for replica_type, replica in replicas.items():
    _check_replica(replica_type, _mapping(replica, replica_type))


def _check_replica(replica_type: str, replica: Mapping[str, Any]) -> None:
  policies = (*options_lib.RESTART_POLICIES, None)
  _check(replica, 'restartPolicy', policies, f'{replica_type}.')
  count = replica.get('replicas', 1)
  is_single = replica_type in ('Chief', 'Master', 'Evaluator')
  option_checks.check(
    type(count) is int and (count == 1 if is_single else count >= 1),
    f'{replica_type}.replicas={count!r}',
    '1' if is_single else 'an integer of at least 1',
    'change it, or leave the type out',
  )
  template = _mapping(replica.get('template'), f'{replica_type}.template')
  spec = _mapping(template.get('spec'), f'{replica_type}.template.spec')
  containers = spec.get('containers')
  named = [
    container
    for container in (containers if isinstance(containers, list) else [])
    if isinstance(container, Mapping) and container.get('name') == CONTAINER
  ]
  option_checks.check(
    len(named) == 1,
    f'{replica_type} with {len(named)} containers named {CONTAINER!r}',
    'one, by whose exit status the operator goes',
    f'name the container that trains {CONTAINER!r}',
  )
  image = named[0].get('image')
  option_checks.check(
    bool(image),
    f'{replica_type} with image={image!r}',
    'the name of an image',
    'add image to its container',
  )
  # Without any the operator adds its own.
  ports = named[0].get('ports') or []
  for port in ports if isinstance(ports, list) else [ports]:
    if isinstance(port, Mapping) and port.get('name') == PORT_NAME:
      found = port.get('containerPort')
      option_checks.check(
        found == PORT,
        f'{replica_type} with {PORT_NAME}={found!r}',
        f'{PORT}, where this package listens',
        f'write containerPort: {PORT}',
      )


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
  option_checks.check(
    isinstance(value, Mapping),
    f'{what}={value!r}',
    'an object',
    'see what --kind=tfjob writes',
  )
  return value


def _check(
  found: Mapping[str, Any],
  name: str,
  allowed: Sequence[str | None],
  prefix: str = '',
) -> None:
  """Whether a field has one of the values; None stands for its absence."""
  value = found.get(name)
  option_checks.check(
    value in allowed,
    f'{prefix}{name}={value!r}',
    ' or '.join(repr(a) for a in allowed if a is not None),
    f'write {name}: {allowed[0]!r}',
  )
