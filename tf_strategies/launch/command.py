"""Starts all tasks of a job on this host, each with its own TF_CONFIG.

  tfs launch --num_workers=2 -- python train.py --epochs=3

Every line that a task writes appears with the task's name before it. When a
task fails, the launcher ends the others, names the first to fail, shows its last
lines and exits with its status (128 + N for signal N). When all training tasks
(chief, workers) have ended well, it ends parameter servers and evaluator;
`tfs.cluster.run_task` lets the evaluator use the rest of --grace_period for the
last checkpoint. With a chief and parameter servers only the chief trains: workers
are servers, and end with them. No task outlives the launcher.

--max_restarts starts a task that failed again, until a training task has ended well:
after that it would repeat alone what the others have finished. A task with the status
of a wrong command line (2), or of a command that cannot be run (126, 127), is not.

In a job of `tfs.elastic.run` the workers decide who goes on, and tell the launcher so.
From then on it ends no task because another one failed: it restarts tasks that have
restarts left, names the others, and exits with 0 if a training task has ended well.
Once one has, a worker that came back and trains alone is ended after the grace period.
A worker that fails after it has trained makes the job fail, since its results may be
lost. If a host is lost, or its launcher gets SIGTERM, the other hosts go on; Ctrl-C
ends all.

On several hosts, run the same line on each, with its own --node_rank, and with one
TFS_SECRET on all:

  tfs launch --nnodes=2 --node_rank=0 --rendezvous=host0:29400 -- python train.py

--num_workers and --num_ps count the tasks of each host; chief and evaluator are on
host 0.
The launchers agree on addresses and ports. When a task fails on one host, or a host is
lost, all end, name it and exit with its status, unless the job is elastic.

Each job of one host gets a random secret (TFS_SECRET) by which its tasks authenticate
each other. TFS_RESTART_COUNT tells a task how often it was started again. A job of one
task gets no TF_CONFIG: it trains in a single process.

Example:

  >>> from tf_strategies import launch
  >>> launch.main(['launch', '--num_workers=1', '--dry_run', '--', 'true'])
  [worker 0] TF_CPP_MIN_LOG_LEVEL=1 ... TFS_SECRET='<hidden>' ... TFS_RESTART_COUNT=0 true
  0
"""

import contextlib
import os
import secrets
import sys
from collections.abc import Sequence

from absl import flags

from tf_strategies import errors, option_checks
from tf_strategies.cluster import command_line, exit_codes
from tf_strategies.cluster import job as job_lib
from tf_strategies.launch import ports as ports_lib
from tf_strategies.launch import supervisor, tasks

FLAGS = (
  (
    'num_workers',
    1,
    'Tasks of type worker. With --chief and --num_ps they are servers, which '
    'are ended when the chief has ended well.',
  ),
  ('num_ps', 0, 'Parameter servers.'),
  ('chief', False, 'Whether a chief is started too.'),
  ('evaluator', False, 'Whether an evaluator is started too.'),
  (
    'max_restarts',
    0,
    'How often each task that fails is started again, with the same TF_CONFIG, '
    'while the others go on, until one that trains has ended well.',
  ),
  (
    'log_dir',
    None,
    'Directory for the output of each task, such as worker_0.log.',
  ),
  (
    'rank_filter',
    None,
    'Tasks whose lines appear here, such as chief,worker:0; default all. Files '
    'in --log_dir hold everything.',
  ),
  (
    'grace_period',
    10.0,
    'Seconds between SIGTERM and SIGKILL when tasks are ended.',
  ),
  ('dry_run', False, 'Print what would be started, and start nothing.'),
  ('nnodes', 1, 'Hosts of the job; all run the same line.'),
  ('node_rank', 0, 'Which of them this is, from 0.'),
  (
    'rendezvous',
    None,
    'Address host:port of host 0 where launchers meet; any free port of it.',
  ),
  (
    'rendezvous_timeout',
    300.0,
    'Seconds within which the launchers of all hosts must meet.',
  ),
)


def _run(values: flags.FlagValues, command: list[str]) -> int:
  if not command:
    raise flags.Error('no command: the command follows a lone --')
  job = command_line.filled(job_lib.TaskCounts, values)
  options = command_line.filled(supervisor.LaunchOptions, values)
  is_alone = values.nnodes == 1
  option_checks.check(
    is_alone == (values.rendezvous is None)
    and not (is_alone and values.node_rank),
    f'--nnodes={values.nnodes}, --node_rank={values.node_rank} and '
    f'--rendezvous={values.rendezvous}',
    'an address of host 0 where launchers meet, and only for several hosts',
    'pass --nnodes=2 or more and --rendezvous=host0:29400 on all hosts, or '
    'none of these flags',
  )
  counts = dict(job.all_counts)
  if values.node_rank:
    counts.update(chief=0, evaluator=0)
  ports = ports_lib.pick_ports(sum(counts.values()))
  with contextlib.ExitStack() as stack:
    if is_alone:
      launchers = None
      hosts = [tasks.HostTasks(tasks.LOOPBACK, counts, ports)]
      secret = secrets.token_hex(job_lib.SECRET_BYTES)
    else:
      from tf_strategies.launch import nodes  # Only here: sockets.

      place = command_line.filled(nodes.Place, values)
      try:
        launchers = nodes.Launchers(place, counts, ports, _say)
      except (errors.RendezvousError, errors.AuthenticationError) as e:
        _say(str(e))
        return exit_codes.exit_code(e)
      stack.enter_context(launchers)
      hosts, secret = launchers.hosts, launchers.secret
    specs = tasks.plan_tasks(hosts, command, secret)
    if values.dry_run:
      for spec in specs:
        print(tasks.describe(spec))
      return 0
    return supervisor.Supervisor(specs, options, launchers).run()


def _say(text: str) -> None:
  print(f'[launch] {text}', file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
  """Runs the launcher.

  Args:
    argv: the program's name, its flags, `--` and the command.

  Returns:
    The exit status: 0, the status of the task that failed first, 128 + N for a
    signal N, or 2 for a wrong command line, which is explained on stderr.
  """
  # Otherwise a closed stdout would give its number to a pipe of the supervisor.
  while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
    pass
  os.close(descriptor)
  return command_line.main(argv, __doc__, FLAGS, _run)
