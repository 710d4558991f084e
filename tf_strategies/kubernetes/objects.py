"""All objects of a job on Kubernetes, in the order to create them.

Example:

  >>> from tf_strategies.kubernetes import objects, options
  >>> shared = options.Options(image='mnist:1', secret_name='ours')
  >>> [d['kind'] for d in objects.documents('tfjob', shared, ['train'])]
  ['TFJob']
"""

from collections.abc import Sequence
from typing import Any

from tf_strategies import errors
from tf_strategies.kubernetes import jobset, pods, tfjob
from tf_strategies.kubernetes import options as options_lib

KINDS = ('tfjob', 'jobset')


def documents(
  kind: str, options: options_lib.Options, command: Sequence[str]
) -> list[dict[str, Any]]:
  """The Secret, unless one exists, and the job.

  Args:
    kind: tfjob or jobset.
    options: of the job.
    command: program and arguments, the same for every task.

  Raises:
    UnsupportedOptionError: the kind is another one, the command is empty, or a
      JobSet is to have a restart policy that it cannot have.
  """
  if kind not in KINDS:
    raise errors.UnsupportedOptionError(
      f'--kind={kind}',
      f'one of {", ".join(KINDS)}',
      'pass --kind=jobset, or --kind=tfjob where Kubeflow runs',
    )
  if not command:
    raise errors.UnsupportedOptionError(
      'an empty command',
      'a program and its arguments',
      'write it after a lone --',
    )
  if kind == 'jobset' and options.restart_policy != 'ExitCode':
    raise errors.UnsupportedOptionError(
      f'--restart_policy={options.restart_policy} with --kind=jobset',
      'ExitCode, by which a JobSet restarts',
      'leave it out; --max_restarts=0 means that nothing is started again',
    )
  make = tfjob.tfjob if kind == 'tfjob' else jobset.jobset
  made = [] if options.secret_name else [pods.secret(options)]
  return [*made, make(options, command)]
