"""Command lines of the form `python -m module [flags] -- command [arguments]`.

Example:

  >>> from tf_strategies.cluster import command_line
  >>> command_line.main(['job', '--num_workers=2', '--', 'true'], 'job', 'A job.',
  ...                   [('num_workers', 1, 'Workers.')],
  ...                   lambda values, command: values.num_workers)
  2
"""

import sys
from collections.abc import Callable, Iterable, Sequence

from absl import flags

from tf_strategies import errors

_DEFINE = {
  bool: flags.DEFINE_bool,
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
}


def main(
  argv: Sequence[str],
  module: str,
  doc: str,
  rows: Iterable[tuple[str, object, str]],
  run: Callable[[flags.FlagValues, list[str]], int],
) -> int:
  """Parses a command line and runs it.

  Args:
    argv: the program's name, its flags, `--` and the command.
    module: the name after `python -m`.
    doc: of the module; --help shows it up to its 'Example:'.
    rows: name, default and help of each flag, of its default's type or a string.
    run: called with the flags and the command.

  Returns:
    The exit status: what `run` returned, or 2 for a wrong command line, which
    is explained on stderr.
  """
  # Apart from absl's global flags, among which is a --log_dir too.
  values = flags.FlagValues()
  for name, default, text in (*rows, ('help', False, 'Print this.')):
    define = _DEFINE.get(type(default), flags.DEFINE_string)
    define(name, default, text, flag_values=values, module_name=module)
  end = argv.index('--') if '--' in argv else len(argv)
  try:
    rest = values(argv[:end])[1:]
    if values.help:
      print(f'{doc.partition("Example:")[0]}{values.get_help()}')
      return 0
    if rest:
      raise flags.Error(
        f'unexpected argument {rest[0]!r}: the command follows a lone --'
      )
    return run(values, list(argv[end + 1 :]))
  except (flags.Error, errors.UnsupportedOptionError) as e:
    usage = f'python -m {module} [flags] -- command [arguments]'
    print(f'{module}: {e}\nUsage: {usage}', file=sys.stderr)
    return 2
