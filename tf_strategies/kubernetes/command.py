"""Writes the Kubernetes manifests of a job, for `kubectl apply -f`.

  python -m tf_strategies.kubernetes --kind=jobset --image=registry/mnist:1 \
    --num_workers=2 --num_ps=1 --checkpoint_pvc=checkpoints -- \
    python -m examples.mnist_parameter_server --checkpoint_dir=/checkpoints

Every task runs the command, as under `tf_strategies.launch`. `--kind=jobset`
needs the JobSet controller, `--kind=tfjob` Kubeflow's training operator v1,
which is legacy. With parameter servers there is a chief, which trains.

The first document is a Secret with new random data, by which the job's tasks
recognise each other: keep the output out of version control, or name a Secret
that exists by --secret_name (with the key `secret`).

Tasks are started again by their exit status: 1, 2, 126 and 127 are permanent,
128 and above are not (tf_strategies.cluster.exit_codes).

Example:

  >>> from tf_strategies import kubernetes
  >>> kubernetes.main(['kubernetes', '--image=mnist:1'])
  2
"""

import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from tf_strategies import errors
from tf_strategies.kubernetes import assembly, tfjob
from tf_strategies.kubernetes import options as options_lib

_USAGE_STATUS = 2
_USAGE = (
  'python -m tf_strategies.kubernetes --image=IMAGE [flags] -- command '
  '[arguments]'
)
_SECRET_NOTE = (
  "# Holds the job's secret: keep it out of version control, or pass "
  '--secret_name.\n'
)
_LEGACY_NOTE = (
  "# TFJob: Kubeflow's training operator v1, which is legacy. Without it: "
  '--kind=jobset.\n'
)


def _flag_values() -> flags.FlagValues:
  """The flags, apart from absl's global ones."""
  values = flags.FlagValues()
  _define_names(values)
  _define_tasks(values)
  flags.DEFINE_bool('help', False, 'Print this.', flag_values=values)
  return values


def _define_names(values: flags.FlagValues) -> None:
  """What the job is called, and what it uses that is there already."""
  flags.DEFINE_string(
    'kind',
    'jobset',
    'jobset or tfjob.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'image',
    None,
    'Image of the container that every task runs in.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'name',
    'tf-strategies',
    'Name of the job.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'namespace',
    None,
    'Namespace of the job; default that of kubectl.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'checkpoint_pvc',
    None,
    'PersistentVolumeClaim for checkpoints, which the evaluator and the tasks '
    'that train mount: with parameter servers the chief alone. Tasks on '
    'several nodes need ReadWriteMany.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'checkpoint_path',
    '/checkpoints',
    'Where it is mounted.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'secret_name',
    None,
    'Secret that exists, with the key `secret`; default a new one.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'restart_policy',
    'ExitCode',
    'Of each task of a TFJob: ExitCode, OnFailure, Always or Never.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'check',
    None,
    'YAML file whose TFJobs are checked; nothing is written.',
    flag_values=values,
  )


def _define_tasks(values: flags.FlagValues) -> None:
  """How many tasks of which type, and how they end and begin again."""
  flags.DEFINE_integer(
    'num_workers',
    1,
    'Tasks of type worker.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_ps',
    0,
    'Parameter servers; with any there is a chief.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'gpus_per_worker',
    0,
    'GPUs of each task that computes gradients.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'max_restarts',
    3,
    'How often each task is started again, on average.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'grace_period',
    30,
    'Seconds between SIGTERM and SIGKILL.',
    flag_values=values,
  )
  flags.DEFINE_bool(
    'chief',
    False,
    'Whether there is a chief without parameter servers too.',
    flag_values=values,
  )
  flags.DEFINE_bool(
    'evaluator',
    False,
    'Whether there is an evaluator.',
    flag_values=values,
  )


def _yaml():
  """PyYAML, which is no requirement of the package itself."""
  if importlib.util.find_spec('yaml') is None:
    raise errors.UnsupportedOptionError(
      'an environment without PyYAML',
      'one with what manifests need',
      "in the checkout run: pip install '.[manifests]'",
    )
  import yaml

  return yaml


def _options(values: flags.FlagValues) -> options_lib.Options:
  if values.image is None:
    raise flags.Error('no --image')
  names = [field.name for field in dataclasses.fields(options_lib.Options)]
  return options_lib.Options(**{name: values[name].value for name in names})


def _write(values: flags.FlagValues, command: Sequence[str]) -> None:
  """Writes the documents to stdout."""
  yaml = _yaml()
  documents = assembly.documents(values.kind, _options(values), command)
  if values.secret_name is None:
    sys.stdout.write(_SECRET_NOTE)
  if values.kind == 'tfjob':
    sys.stdout.write(_LEGACY_NOTE)
  yaml.safe_dump_all(
    documents, sys.stdout, sort_keys=False, explicit_start=True
  )


def _check(path: str) -> None:
  """Refuses what is wrong with the TFJobs of a file."""
  yaml = _yaml()
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
    documents = list(yaml.safe_load_all(text))
  except (OSError, ValueError, yaml.YAMLError) as e:
    raise errors.UnsupportedOptionError(
      f'--check={path} ({" ".join(str(e).split())})',
      'a file of YAML documents',
      'pass the file that kubectl apply -f would take',
    ) from e
  jobs = [
    document
    for document in documents
    if isinstance(document, dict) and document.get('kind') == 'TFJob'
  ]
  if not jobs:
    raise errors.UnsupportedOptionError(
      f'--check={path}, which has no TFJob',
      'a file with at least one document of kind TFJob',
      'pass another file; of a JobSet, kubectl apply --dry-run=server says more',
    )
  for job in jobs:
    tfjob.check_tfjob(job)


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: the program's name, its flags, `--` and the command of the tasks.

  Returns:
    The exit status: 0, or 2 for a wrong command line, or a wrong file to be
    checked, which is explained on stderr.
  """
  own = list(argv)
  end = own.index('--') if '--' in own else len(own)
  own, command = own[:end], own[end + 1 :]
  values = _flag_values()
  try:
    rest = values(own)[1:]
    if values.help:
      print(f'{__doc__.partition("Example:")[0]}{values.get_help()}')
      return 0
    if rest:
      raise flags.Error(
        f'unexpected argument {rest[0]!r}: the command follows a lone --'
      )
    if values.check is not None:
      _check(values.check)
      return 0
    _write(values, command)
  except (flags.Error, errors.UnsupportedOptionError) as e:
    print(f'kubernetes: {e}\nUsage: {_USAGE}', file=sys.stderr)
    return _USAGE_STATUS
  return 0
