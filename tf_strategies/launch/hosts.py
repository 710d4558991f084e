"""`tfs launch --hostfile=FILE`: the launchers of all hosts, started over ssh.

The first host of the file is this one. To the supervisor here the launcher of each
host is a task: `node 0`, `node 1`. One that fails, or whose ssh is lost, is named,
and ends all, unless the job is elastic. The launchers themselves tell each other how
tasks end (`nodes`).

Example:

  >>> import pathlib, tempfile
  >>> from tf_strategies.launch import hosts
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   path = pathlib.Path(directory, 'hosts')
  ...   _ = path.write_text('gpu1 slots=4\\nme@gpu2  # as user me\\n')
  ...   hosts.read(str(path))
  [Host(name='gpu1', slots=4), Host(name='me@gpu2', slots=None)]
"""

import dataclasses
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

from tf_strategies import errors, option_checks
from tf_strategies.launch import tasks

_LINE = re.compile(r'(?!-)([A-Za-z0-9_.@:-]+)(?:\s+slots=([0-9]{1,9}))?')
_FIX = "write a host on each line, such as 'gpu1' or 'gpu1 slots=4'"
# The environment of a host's shell lacks what this one's launcher has.
_PASSED_ON = ('TFS_', 'TF_', 'XLA_', 'NCCL_', 'PYTHON')
# A host that answers nothing is lost after 15 seconds; nobody types passwords.
_SSH_OPTIONS = (
  '-T',
  *('-o', 'BatchMode=yes', '-o', 'ConnectTimeout=15'),
  *('-o', 'ServerAliveInterval=5', '-o', 'ServerAliveCountMax=3'),
)
# What the shell there runs comes over stdin, so the secret is on no command line
# here or there. Signals are not for ssh: it brings the last words of its launcher,
# which hears of the end by the others. If it does not, SIGKILL is left.
_OVER_STDIN = (
  "trap '' HUP INT QUIT TERM; script=$1; shift; "
  'printf \'export TFS_SECRET=%s\\n%s\\n\' "$TFS_SECRET" "$script" | "$@"'
)


@dataclasses.dataclass(frozen=True)
class Host:
  """A line of a hostfile.

  Attributes:
    name: as ssh takes it: 'gpu1' or 'me@gpu1'.
    slots: number of its workers; None for --num_workers.
  """

  name: str
  slots: int | None = None


def read(path: str) -> list[Host]:
  """Returns the hosts of a file, two or more; a # begins a comment.

  Raises:
    UnsupportedOptionError: it cannot be read, names a line that is no host, or
      has less than two.
  """
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, ValueError) as e:
    raise errors.UnsupportedOptionError(
      f'--hostfile={path} ({e})', 'a text file', _FIX
    ) from e
  found = []
  for number, line in enumerate(text.splitlines(), 1):
    words = line.partition('#')[0].strip()
    if not words:
      continue
    match = _LINE.fullmatch(words)
    option_checks.check(
      match, f'{path}:{number}: {words!r}', 'a host, perhaps with slots=N', _FIX
    )
    found.append(Host(match[1], int(match[2]) if match[2] else None))
  option_checks.check(
    len(found) > 1,
    f'--hostfile={path} with {len(found)} hosts',
    'two or more hosts, the first of them this one',
    'leave --hostfile out to start all tasks here',
  )
  return found


def plan(
  hosts: Sequence[Host],
  port: int,
  ssh: str,
  num_workers: int,
  flags: Sequence[str],
  command: Sequence[str],
  secret: str,
) -> list[tasks.TaskSpec]:
  """Returns the launcher of each host, as a task `node N`.

  Args:
    hosts: of the job; the first is this one.
    port: of the first host, where launchers meet.
    ssh: the program, perhaps with options: 'ssh -p 2222'.
    num_workers: of hosts without `slots`.
    flags: further ones, of all launchers.
    command: of each task.
    secret: of the job.

  Example:

    >>> pair = [Host('a'), Host('b', 2)]
    >>> local, remote = plan(pair, 29400, 'ssh', 1, [], ['train'], '5ec7e7')
    >>> local.command[1:]
    ('-m', 'tf_strategies', 'launch', '--nnodes=2', '--node_rank=0', '--rendezvous=a:29400', '--num_workers=1', '--', 'train')
    >>> remote.command[-2:], '5ec7e7' in str(remote.command)
    (('b', '/bin/sh'), False)
  """
  exports = [
    f'export {name}={shlex.quote(value)}'
    for name, value in sorted(os.environ.items())
    if name.startswith(_PASSED_ON) and name not in tasks.NOT_INHERITED
  ]
  # Without the name of a user.
  rendezvous = tasks.address_of(hosts[0].name.rpartition('@')[2], port)
  specs = []
  for rank, host in enumerate(hosts):
    words = [
      *(sys.executable, '-m', 'tf_strategies', 'launch'),
      *(f'--nnodes={len(hosts)}', f'--node_rank={rank}'),
      f'--rendezvous={rendezvous}',
      f'--num_workers={num_workers if host.slots is None else host.slots}',
      *(*flags, '--', *command),
    ]
    told = secret
    if rank:
      line = f'cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}'
      script = '\n'.join([*exports, line])
      reach = [*shlex.split(ssh), *_SSH_OPTIONS, host.name, '/bin/sh']
      words = ['sh', '-c', _OVER_STDIN, 'sh', script, *reach]
      told = shlex.quote(secret)
    environment = {'TFS_SECRET': told, 'PYTHONUNBUFFERED': '1'}
    specs.append(
      tasks.TaskSpec(
        *('node', rank, tuple(words), environment),
        shown=f'node {rank} ({host.name})',
      )
    )
  return specs
