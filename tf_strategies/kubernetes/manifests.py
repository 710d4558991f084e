"""Fills in the templates of a job's objects: a Secret, and a JobSet, TrainJob or TFJob.

`templates.yaml` has the objects. In a JobSet nothing writes a TF_CONFIG: a pod learns
its place from the downward API, and `ClusterConfig.from_env` does the rest
(`cluster.sources.kubernetes`). A pod that ends with one of
`exit_codes.PERMANENT_EXIT_CODES` fails the JobSet at once. Any other status, or an
eviction, starts a new pod of the same index. When the job is done, the evaluator has
the pod's grace period for the last checkpoint, and 20 seconds at most
(`cluster.run_task`).
"""

import copy
import pathlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tf_strategies import errors, option_checks
from tf_strategies.cluster import exit_codes
from tf_strategies.cluster import job as job_lib
from tf_strategies.cluster.sources import roles
from tf_strategies.kubernetes import options as options_lib

KINDS = ('tfjob', 'jobset', 'trainjob')

_TEMPLATES = pathlib.Path(__file__).parent / 'templates.yaml'


def load_yaml():
  """Returns PyYAML, which the package itself does not require.

  Raises:
    UnsupportedOptionError: it is not installed.
  """
  try:
    import yaml
  except ImportError as e:
    raise errors.UnsupportedOptionError(
      'one without it',
      'an environment with PyYAML',
      "in the checkout run: pip install '.[manifests]'",
    ) from e
  return yaml


def documents(
  kind: str, options: options_lib.Options, command: Sequence[str]
) -> list[dict[str, Any]]:
  """Returns all objects in the order to create them: the Secret, if new; the job.

  Args:
    kind: one of `KINDS`.
    options: of the job.
    command: program and arguments, the same for every task.

  Raises:
    UnsupportedOptionError: the kind is another one, the command is empty, or
      PyYAML is missing.

  Example:

    >>> shared = options_lib.Options(image='mnist:1', secret_name='ours')
    >>> [document['kind'] for document in documents('tfjob', shared, ['train'])]
    ['TFJob']
  """
  option_checks.check_choice(
    '--kind',
    kind,
    KINDS,
    'pass --kind=jobset, or --kind=trainjob where Kubeflow Trainer runs',
  )
  option_checks.check(
    bool(command),
    'an empty command',
    'a program and its arguments',
    'write it after a lone --',
  )
  templates = load_yaml().safe_load(_TEMPLATES.read_text(encoding='utf-8'))
  values = _values(options, command)
  tasks = {
    task_type: _task(kind, templates, options, values, task_type, count)
    for task_type, count in options.all_counts.items()
    if count
  }
  if kind == 'tfjob':
    values['tasks'] = {
      'PS' if task_type == 'ps' else task_type.capitalize(): task
      for task_type, task in tasks.items()
    }
    names = ['tfjob']
  else:
    trains = [t for t in tasks if t in options.training_types]
    values |= {'tasks': list(tasks.values()), 'training_types': trains}
    names = ['jobset']
  if kind == 'trainjob':
    values['jobset_spec'] = _fill(templates['jobset'], values)['spec']
    names = ['training_runtime', 'trainjob']
  if not options.secret_name:
    names.insert(0, 'secret')
  return [_fill(templates[name], values) for name in names]


def _values(
  options: options_lib.Options, command: Sequence[str]
) -> dict[str, Any]:
  """Returns the values that do not depend on the type of a task."""
  counts = options.all_counts
  return {
    'name': options.name,
    'image': options.image,
    # Kubernetes would expand $(NAME), and takes $$ for $.
    'command': [word.replace('$', '$$') for word in command],
    'secret': secrets.token_hex(job_lib.SECRET_BYTES),
    'secret_name': options.secret_name or f'{options.name}-secret',
    'gpus': str(options.gpus_per_worker),
    'checkpoint_pvc': options.checkpoint_pvc,
    'port': roles.DEFAULT_PORT,
    'port_text': str(roles.DEFAULT_PORT),
    **{f'num_{kind}': str(count) for kind, count in counts.items()},
    'all_restarts': options.max_restarts * sum(counts.values()),
    'success_policy': '' if counts['chief'] else 'AllWorkers',
    'permanent_statuses': list(exit_codes.PERMANENT_EXIT_CODES),
  }


def _task(
  kind: str,
  templates: Mapping[str, Any],
  options: options_lib.Options,
  values: Mapping[str, Any],
  task_type: str,
  count: int,
) -> dict[str, Any]:
  """Returns what a job holds for its tasks of one type."""
  pod = copy.deepcopy(templates['pod'])
  (container,) = pod['containers']
  # With parameter servers the chief only hands out steps.
  computes = ('worker',) if options.num_ps else ('chief', 'worker')
  if not options.gpus_per_worker or task_type not in computes:
    del container['resources']
  # A claim that one node at a time may mount would keep others from starting.
  mounts = (*options.training_types, 'evaluator')
  if not options.checkpoint_pvc or task_type not in mounts:
    del pod['volumes'], container['volumeMounts']
  name = 'tfjob_task'
  if kind != 'tfjob':
    name = 'jobset_task'
    pod['restartPolicy'] = 'Never'
    container['env'] += templates['jobset_environment']
  return _fill(
    templates[name],
    {
      **values,
      'task_type': task_type,
      'count': count,
      'restarts': options.max_restarts * count,
      'pod': _fill(pod, values),
    },
  )


def _fill(template: Any, values: Mapping[str, Any]) -> Any:
  """Returns a copy of a template with the value of each `$name` in it."""
  if isinstance(template, dict):
    return {key: _fill(part, values) for key, part in template.items()}
  if isinstance(template, list):
    return [_fill(part, values) for part in template]
  if isinstance(template, str) and template.startswith('$'):
    return copy.deepcopy(values[template[1:]])
  return template
