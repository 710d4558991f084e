"""Says what this machine and this TF_CONFIG can do, and what to fix.

  tfs doctor
  tfs doctor --checkpoint_dir=checkpoints
  tfs launch --num_workers=2 -- tfs doctor --wait=60

Each line is a check: ok, note (which hinders nothing) or FAIL, with what to do. By
itself it disturbs nobody. With --wait it takes this task's place in the job: run it on
all tasks at once, in place of the training. They then meet as training would, which
tells whether secrets, certificates and versions fit together.

The status is 0 if nothing failed, 1 if something did, and 2 for a wrong flag.
"""

from collections.abc import Sequence

from absl import flags

from tf_strategies import option_checks
from tf_strategies.cluster import command_line
from tf_strategies.doctor import findings, job, machine

_FLAGS = (
  (
    'wait',
    0.0,
    'Seconds within which all tasks of the job must run this too, and meet.',
  ),
  ('checkpoint_dir', None, 'Directory in which a small checkpoint is tried.'),
)


def _run(values: flags.FlagValues, words: list[str]) -> int:
  option_checks.check_seconds('--wait', values.wait, or_zero=True)
  found, versions = machine.look(values.checkpoint_dir)
  for finding in found:
    print(finding, flush=True)
  for finding in job.look(wait=values.wait, versions=versions):
    print(finding, flush=True)
    found.append(finding)
  failed = [finding.name for finding in found if finding.state == findings.FAIL]
  if failed:
    print(f'{len(failed)} of {len(found)} checks failed: {", ".join(failed)}.')
    return 1
  print(f'{len(found)} checks, none failed.')
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: the program's name and its flags.

  Returns:
    The exit status: 0, 1 if something is to be fixed, 2 for a wrong flag.
  """
  return command_line.main(argv, __doc__, _FLAGS, _run, words='')
