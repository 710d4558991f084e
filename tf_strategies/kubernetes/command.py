"""Writes the Kubernetes manifests of a job, for `kubectl apply -f`.

  python -m tf_strategies.kubernetes --kind=jobset --image=registry/mnist:1 \
    --num_workers=2 --num_ps=1 --checkpoint_pvc=checkpoints -- \
    python -m examples.mnist_keras_fit --strategy=parameter_server \
    --checkpoint_dir=/checkpoints

Every task runs the command, as under `tf_strategies.launch`. `--kind=jobset`
needs the JobSet controller, `--kind=trainjob` Kubeflow Trainer, and `--kind=tfjob`
Kubeflow's training operator v1, which is legacy. With parameter servers there is a chief, which trains.

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
import sys
from collections.abc import Sequence

from tf_strategies.cluster import command_line
from tf_strategies.kubernetes import manifests
from tf_strategies.kubernetes import options as options_lib

_SECRET_NOTE = (
  "# Holds the job's secret: keep it out of version control, or pass "
  '--secret_name.\n'
)


@dataclasses.dataclass(frozen=True)
class _Output:
  """What is written."""

  kind: str = command_line.option('jobset, trainjob or tfjob.', 'jobset')


def _run(
  written: _Output, options: options_lib.Options, command: list[str]
) -> int:
  yaml = manifests.load_yaml()
  documents = manifests.documents(written.kind, options, command)
  if not options.secret_name:
    sys.stdout.write(_SECRET_NOTE)
  yaml.safe_dump_all(
    documents, sys.stdout, sort_keys=False, explicit_start=True
  )
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: the program's name, its flags, `--` and the command of the tasks.

  Returns:
    The exit status: 0, or 2 for a wrong command line, which stderr explains.
  """
  return command_line.main(argv, __doc__, (_Output, options_lib.Options), _run)
