"""Starts all tasks of a job on this host, each with its own TF_CONFIG.

  python -m tf_strategies.launch --num_workers=2 -- python train.py --epochs=3

Every line that a task writes appears with the task's name before it. When a
task fails, the others are ended, and the launcher says which one was first and
what it wrote last, and exits with its status (128 + N for signal N). When all
training tasks (chief, workers) have ended well, parameter servers and evaluator
are ended; what --grace_period leaves, `tfs.cluster.run_task` lets the evaluator use
for the last checkpoint. With a chief and parameter servers only the chief trains: workers are
servers, and ended with them. No task outlives the launcher, whatever ends it.

--max_restarts starts a task that failed again. Without parameter servers that ends
when a training task has ended well: who was lost would train alone what the others
have finished. So it is not started again, and one that is back already is ended
after the grace period, with a warning: it may be one that was let in again and
saves the results. (So it may also have finished a very short training; elastic jobs
of min_workers=2 or more never train alone.) The job has then ended well, unless
the task that writes the results was lost after the end of another.

Each job gets a random secret (TFS_SECRET) with which its tasks recognise each
other. A task that was started again finds in TFS_RESTART_COUNT how often. A job
of one task gets no TF_CONFIG: it trains in a single process.

Example:

  >>> from tf_strategies import launch
  >>> launch.main(['launch', '--num_workers=1', '--dry_run', '--', 'true'])
  [worker 0] PYTHONUNBUFFERED=1 TFS_SECRET='<hidden>' ... TFS_RESTART_COUNT=0 true
  0
"""

import importlib.util
import os
import secrets
import sys
from collections.abc import Sequence

from absl import flags

from tf_strategies import errors
from tf_strategies.cluster import job as job_lib
from tf_strategies.launch import rank_filter, supervisor, tasks

_USAGE_STATUS = 2
_USAGE = 'python -m tf_strategies.launch [flags] -- command [arguments]'


def _flag_values() -> flags.FlagValues:
  """The flags, apart from absl's global ones, which have a --log_dir too."""
  values = flags.FlagValues()
  flags.DEFINE_integer(
    'num_workers',
    1,
    'Tasks of type worker. With --chief and --num_ps they are servers, which '
    'are ended when the chief has ended well.',
    flag_values=values,
  )
  flags.DEFINE_integer('num_ps', 0, 'Parameter servers.', flag_values=values)
  flags.DEFINE_bool(
    'chief', False, 'Whether a chief is started too.', flag_values=values
  )
  flags.DEFINE_bool(
    'evaluator', False, 'Whether an evaluator is too.', flag_values=values
  )
  flags.DEFINE_integer(
    'max_restarts',
    0,
    'How often each task that fails is started again, with the same TF_CONFIG, '
    'while the others go on; without parameter servers, until one that trains '
    'has ended well.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'log_dir',
    None,
    'Directory for the output of each task, such as worker_0.log.',
    flag_values=values,
  )
  flags.DEFINE_bool(
    'tee',
    True,
    'Whether what goes into --log_dir also appears here. --notee leaves this '
    'terminal to the launcher, and to the last lines of a task that fails.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'rank_filter',
    None,
    'Whose lines appear here, such as chief,worker:0-1; default all. Files in '
    '--log_dir hold everything.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'grace_period',
    10.0,
    'Seconds between SIGTERM and SIGKILL when tasks are ended.',
    flag_values=values,
  )
  flags.DEFINE_bool(
    'dry_run',
    False,
    'Print what would be started, and start nothing.',
    flag_values=values,
  )
  flags.DEFINE_bool('help', False, 'Print this.', flag_values=values)
  return values


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """The launcher's own arguments, and the command after the first `--`."""
  own = list(arguments)
  if '--' not in own:
    return own, []
  end = own.index('--')
  return own[:end], own[end + 1 :]


def _check_host() -> None:
  if os.name != 'posix':
    raise errors.UnsupportedOptionError(
      f'os.name={os.name!r}',
      'a POSIX system, since tasks are process groups',
      'start it on Linux or macOS, or in a container',
    )
  for module in ('portpicker', 'psutil'):
    if importlib.util.find_spec(module) is None:
      raise errors.UnsupportedOptionError(
        f'an environment without {module}',
        'one with what the launcher needs',
        "in the checkout run: pip install '.[launch]'",
      )


def _shown(values: flags.FlagValues, job: job_lib.Job) -> frozenset[str] | None:
  """The names of the tasks whose lines appear on the terminal; None for all."""
  if values.tee:
    if values.rank_filter is None:
      return None
    return rank_filter.parse(values.rank_filter, job.all_counts)
  if values.rank_filter is not None:
    raise errors.UnsupportedOptionError(
      f'--notee with --rank_filter={values.rank_filter}',
      'one of them, since --notee shows no lines at all',
      'leave --notee out',
    )
  if not values.log_dir:
    raise errors.UnsupportedOptionError(
      '--notee without --log_dir',
      'a directory for what is not shown',
      'pass --log_dir=logs, or leave --notee out',
    )
  return frozenset()


def _run(values: flags.FlagValues, command: list[str]) -> int:
  job = job_lib.Job(
    values.num_workers, values.num_ps, values.chief, values.evaluator
  )
  options = supervisor.Options(
    values.max_restarts,
    values.grace_period,
    values.log_dir,
    # https://no-color.org: any text but the empty one means no colours.
    sys.stdout.isatty() and not os.environ.get('NO_COLOR'),
    _shown(values, job),
  )
  _check_host()
  specs = tasks.plan_tasks(
    job,
    command,
    tasks.pick_ports(sum(job.counts.values())),
    secrets.token_hex(job_lib.SECRET_BYTES),
  )
  if values.dry_run:
    for spec in specs:
      print(tasks.describe(spec))
    return 0
  sys.stdout.flush()
  return supervisor.Supervisor(specs, options, owns_process=True).run()


def main(argv: Sequence[str]) -> int:
  """Runs the launcher.

  Args:
    argv: the program's name, its flags, `--` and the command.

  Returns:
    The exit status: 0, that of the task that failed first, 128 + N for a
    signal N, or 2 for a wrong command line, which is explained on stderr.
  """
  own, command = _split(argv)
  values = _flag_values()
  try:
    rest = values(own)[1:]
    if values.help:
      print(f'{__doc__.partition("Example:")[0]}{values.get_help()}')
      return 0
    if rest or not command:
      what = f'unexpected argument {rest[0]!r}' if rest else 'no command'
      raise flags.Error(f'{what}: the command follows a lone --')
    return _run(values, command)
  except (flags.Error, errors.UnsupportedOptionError) as e:
    print(f'launch: {e}\nUsage: {_USAGE}', file=sys.stderr)
    return _USAGE_STATUS
