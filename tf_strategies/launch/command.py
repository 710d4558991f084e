"""Starts all tasks of a job on this host, each with its own TF_CONFIG.

  tfs launch --num_workers=2 -- python train.py --epochs=3

Each output line of a task begins with the name of the task. When a task fails, the
launcher ends the others, names the task that failed first, shows its last lines and
exits with its status (128 + N for signal N). When all training tasks (chief, workers)
have succeeded, it ends parameter servers and the evaluator. With
`tfs.cluster.run_task`, the evaluator can use the rest of --grace_period for the last
checkpoint. With a chief and parameter servers, only the chief trains: workers are
servers, and end with them. No task outlives the launcher.

--max_restarts restarts a failed task, unless a training task has succeeded: the failed
task would repeat alone what the others have finished. A task is not restarted if its
status is 2 (a wrong command line), or 126 or 127 (the command cannot be run).

In a job of `tfs.elastic.run`, the workers decide which of them continue. They tell the
launcher that the job is elastic. From then on, it ends no task because another one
failed. It restarts tasks that have restarts left, names the others, and exits with 0 if
a training task has succeeded. After that, it ends a restarted worker that trains alone,
when the grace period is over. If a worker fails after its training, the job fails,
since its results may be lost. If a host is lost, or its launcher gets SIGTERM, the
other hosts continue. Ctrl-C ends all.

On several hosts, run the same command on each, with its own --node_rank. Set the same
TFS_SECRET on all of them:

  tfs launch --nnodes=2 --node_rank=0 --rendezvous=host0:29400 -- python train.py

--num_workers and --num_ps count the tasks of each host. The chief and the evaluator are
on host 0. The launchers agree on addresses and ports. When a task fails or a host is
lost, all launchers name it, end their tasks and exit with its status, unless the job is
elastic.

A job on one host gets a random secret (TFS_SECRET), with which its tasks authenticate
each other. TFS_RESTART_COUNT tells a task how often it was restarted. A job of one task
gets no TF_CONFIG: it trains in a single process.

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

from tf_strategies import errors
from tf_strategies.cluster import command_line, exit_codes
from tf_strategies.cluster import job as job_lib
from tf_strategies.launch import ports as ports_lib
from tf_strategies.launch import supervisor, tasks


def _run(
  job: job_lib.TaskCounts,
  options: supervisor.LaunchOptions,
  place: tasks.Place,
  command: list[str],
) -> int:
  if not command:
    raise errors.UnsupportedOptionError(
      'none',
      'a command after a lone --',
      'append it, as in: -- python train.py',
    )
  counts = job.all_counts
  if place.node_rank:
    counts.update(chief=0, evaluator=0)
  ports = ports_lib.pick_ports(sum(counts.values()))
  with contextlib.ExitStack() as stack:
    if place.is_alone:
      launchers = None
      hosts = [tasks.HostTasks(tasks.LOOPBACK, counts, ports)]
      secret = secrets.token_hex(job_lib.SECRET_BYTES)
    else:
      from tf_strategies.launch import nodes  # Only here: sockets.

      try:
        launchers = nodes.Launchers(place, counts, ports, _say)
      except (errors.RendezvousError, errors.AuthenticationError) as e:
        _say(str(e))
        return exit_codes.exit_code(e)
      stack.enter_context(launchers)
      hosts, secret = launchers.hosts, launchers.secret
    specs = tasks.plan_tasks(hosts, command, secret)
    if options.dry_run:
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
  kinds = job_lib.TaskCounts, supervisor.LaunchOptions, tasks.Place
  return command_line.main(argv, __doc__, kinds, _run)
