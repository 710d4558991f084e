"""`tfs`, or `python -m tf_strategies`: one command for a shell.

Each command is the `main` of a module, which is loaded when it is called. So help and
messages about wrong command lines appear at once.

Example:

  >>> from tf_strategies import __main__
  >>> __main__.main(['tfs', 'launch', '--num_workers=1', '--dry_run', '--', 'true'])
  [worker 0] ... true
  0
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

from tf_strategies import version

_COMMANDS = {
  'launch': (
    'start all tasks of a job on this host, or on several',
    lambda: importlib.import_module('tf_strategies.launch.command'),
  ),
  'manifests': (
    'write the Kubernetes manifests of a job',
    lambda: importlib.import_module('tf_strategies.kubernetes.command'),
  ),
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command.

  Args:
    argv: 'tfs', the command and its arguments; those of this process by default.

  Returns:
    The exit status of the command, or 2 if there is no such command. Then stderr
    explains it.
  """
  words = list(sys.argv if argv is None else argv)[1:]
  if words and words[0] in _COMMANDS:
    module = _COMMANDS[words[0]][1]()
    return module.main([f'tfs {words[0]}', *words[1:]])
  if words[:1] in (['--help'], ['-h'], ['help']):
    print(_help())
    return 0
  if words[:1] == ['--version']:
    print(f'tf_strategies {version.__version__}')
    return 0
  print(_what_is_wrong(words), file=sys.stderr)
  return 2


def _help() -> str:
  width = max(map(len, _COMMANDS))
  rows = [f'  {name:{width}}  {told}' for name, (told, _) in _COMMANDS.items()]
  return '\n'.join(
    [
      'Usage: tfs <command> [flags]',
      '',
      *rows,
      '',
      'tfs <command> --help shows the flags of a command.',
    ]
  )


def _what_is_wrong(words: list[str]) -> str:
  if not words:
    return _help()
  near = difflib.get_close_matches(words[0], _COMMANDS)
  hint = f' Did you mean: tfs {near[0]}?' if near else ''
  return (
    f'tfs: no command {words[0]!r}. Expected one of '
    f'{", ".join(_COMMANDS)}.{hint}'
  )


if __name__ == '__main__':
  sys.exit(main())
