"""Command lines of `tfs`: flags, then a command.

Example:

  >>> from tf_strategies.cluster import command_line
  >>> command_line.main(
  ...   ['job', '--num_workers=2', '--', 'true'], 'A job.',
  ...   [('num_workers', 1, 'Workers.')],
  ...   lambda values, command: values.num_workers)
  2
"""

import dataclasses
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from absl import flags

from tf_strategies import errors, option_checks

_Options = TypeVar('_Options')
_INTERRUPTED = 128 + signal.SIGINT
_DEFINE = {
  bool: flags.DEFINE_bool,
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
}


def main(
  argv: Sequence[str],
  doc: str,
  rows: Iterable[tuple[str, object, str]],
  run: Callable[[flags.FlagValues, list[str]], int],
) -> int:
  """Parses a command line and runs it.

  Args:
    argv: the program's name, such as 'tfs launch', and its arguments.
    doc: of the module; --help shows it up to its 'Example:'.
    rows: name, default and help of each flag. A flag is of its default's type, or a
      string if the default is None.
    run: called with the flags, and with the command behind a lone --.

  Returns:
    The exit status: what `run` returned; 2 for a wrong command line, which is
    explained on stderr; 130 after Ctrl-C.
  """
  program = argv[0]
  # Apart from absl's global flags, among which is a --log_dir too.
  values = flags.FlagValues()
  for name, default, text in rows:
    define = _DEFINE.get(type(default), flags.DEFINE_string)
    define(name, default, text, flag_values=values, module_name=program)
  flags.DEFINE_bool(
    'help', False, 'Print this.', values, program, short_name='h'
  )
  end = argv.index('--') if '--' in argv else len(argv)
  try:
    unexpected = values(argv[:end])[1:]
    if values.help:
      print(f'{doc.partition("Example:")[0]}{values.get_help()}')
      return 0
    if unexpected:
      raise flags.Error(
        f'unexpected argument {unexpected[0]!r}: the command follows a lone --'
      )
    return run(values, list(argv[end + 1 :]))
  except KeyboardInterrupt:
    print(f'{program}: interrupted.', file=sys.stderr)
    return _INTERRUPTED
  except (
    flags.Error,
    errors.UnsupportedOptionError,
    errors.ClusterConfigError,
  ) as e:
    usage = f'{program} [flags] -- command [arguments]'
    print(f'{program}: {e}{_meant(e, values)}\nUsage: {usage}', file=sys.stderr)
    return 2


def filled(kind: Callable[..., _Options], values: flags.FlagValues) -> _Options:
  """Returns an object of a data class, whose fields have the values of their flags."""
  names = [field.name for field in dataclasses.fields(kind)]
  return kind(**{name: values[name].value for name in names})


def _meant(error: Exception, values: flags.FlagValues) -> str:
  """Returns which flag an unknown one may stand for, where absl does not."""
  if not isinstance(error, flags.UnrecognizedFlagError) or 'mean' in str(error):
    return ''
  typed = error.flagname.replace('-', '_')
  # --workers is nearer to --num_workers than letters say.
  meant = [name for name in values if name.endswith(f'_{typed}')]
  meant += filter(None, [option_checks.nearest(typed, list(values))])
  return f'. Did you mean: {meant[0]} ?' if meant else ''
