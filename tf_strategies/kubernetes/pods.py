"""The pod of one task, and the secret that all of a job share.

Example:

  >>> from tf_strategies.kubernetes import options, pods
  >>> spec = pods.pod_spec(options.Options(image='mnist:1'), 'worker', ['train'])
  >>> spec['containers'][0]['name']
  'tensorflow'
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tf_strategies.cluster import exit_codes
from tf_strategies.cluster import job as job_lib
from tf_strategies.cluster.sources import roles
from tf_strategies.kubernetes import options as options_lib

# A TFJob's controller looks for these two names, and takes the port from there.
CONTAINER = 'tensorflow'
PORT_NAME = 'tfjob-port'
PORT = roles.DEFAULT_PORT

_SECRET_KEY = 'secret'
_VOLUME = 'checkpoints'


def pod_spec(
  options: options_lib.Options,
  task_type: str,
  command: Sequence[str],
  environment: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
  """What runs in the pods of one type of task.

  Args:
    options: of the job.
    task_type: chief, worker, ps or evaluator.
    command: program and arguments, the same for every task.
    environment: further variables, as Kubernetes writes them.
  """
  container: dict[str, Any] = {
    'name': CONTAINER,
    'image': options.image,
    # Kubernetes would expand $(NAME), and takes $$ for $.
    'command': [word.replace('$', '$$') for word in command],
    'env': [
      variable('PYTHONUNBUFFERED', '1'),
      # A server that was evicted is not one that has done its work.
      variable(
        exit_codes.TERMINATED_VARIABLE, str(exit_codes.RESTARTABLE_EXIT_CODE)
      ),
      {
        'name': 'TFS_SECRET',
        'valueFrom': {
          'secretKeyRef': {
            'name': options.made_secret_name,
            'key': _SECRET_KEY,
          }
        },
      },
      *environment,
    ],
    'ports': [{'name': PORT_NAME, 'containerPort': PORT}],
  }
  spec: dict[str, Any] = {
    'terminationGracePeriodSeconds': options.grace_period,
    # Variables that describe the namespace's Services: one that is called tfs
    # would set TFS_PORT.
    'enableServiceLinks': False,
    'containers': [container],
  }
  if options.gpus_per_worker and task_type in options.gpu_types:
    container['resources'] = {
      'limits': {'nvidia.com/gpu': str(options.gpus_per_worker)}
    }
  if options.checkpoint_pvc and task_type in options.checkpoint_types:
    container['volumeMounts'] = [
      {'name': _VOLUME, 'mountPath': options.checkpoint_path}
    ]
    spec['volumes'] = [
      {
        'name': _VOLUME,
        'persistentVolumeClaim': {'claimName': options.checkpoint_pvc},
      }
    ]
  return spec


def variable(name: str, value: str) -> dict[str, str]:
  """A variable with a value that is known now."""
  return {'name': name, 'value': value}


def metadata(options: options_lib.Options, name: str) -> dict[str, Any]:
  """Name and, if one was chosen, namespace of an object."""
  found = {'name': name}
  if options.namespace is not None:
    found['namespace'] = options.namespace
  return found


def secret(options: options_lib.Options) -> dict[str, Any]:
  """A Secret with new random data, which `TFS_SECRET` of the pods names."""
  return {
    'apiVersion': 'v1',
    'kind': 'Secret',
    'metadata': metadata(options, options.made_secret_name),
    'type': 'Opaque',
    'stringData': {_SECRET_KEY: secrets.token_hex(job_lib.SECRET_BYTES)},
  }
