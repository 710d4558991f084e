"""Command lines of `tfs`: flags, then a command.

Example:

  >>> from tf_strategies.cluster import command_line
  >>> @dataclasses.dataclass
  ... class Counts:
  ...   num_workers: int = command_line.option('Workers.', 1)
  >>> command_line.main(
  ...   ['job', '--num_workers=2', '--', 'true'], 'A job.', [Counts],
  ...   lambda counts, command: counts.num_workers)
  2
"""

import dataclasses
import itertools
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from tf_strategies import errors, option_checks

_INTERRUPTED = 128 + signal.SIGINT
_DEFINE = {
  bool: flags.DEFINE_bool,
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
}


def option(help: str, default: Any = None) -> Any:
  """Returns a field of a data class that is a flag, too."""
  return dataclasses.field(default=default, metadata={'help': help})


def main(
  argv: Sequence[str],
  doc: str,
  kinds: Sequence[Callable[..., Any]],
  run: Callable[..., int],
) -> int:
  """Parses a command line and runs it.

  Args:
    argv: the program's name, such as 'tfs launch', and its arguments.
    doc: of the module; --help shows it up to its 'Example:'.
    kinds: data classes, whose fields are flags: see `option`. A flag is of its
      default's type, or a string if the default is None.
    run: called with an object of each kind, whose fields have the values of their
      flags, and with the command behind a lone --.

  Returns:
    The exit status: what `run` returned; 2 for a wrong command line, which is
    explained on stderr; 130 after Ctrl-C.
  """
  program = argv[0]
  # Apart from absl's global flags, among which is a --log_dir too.
  values = flags.FlagValues()
  for field in itertools.chain(*map(dataclasses.fields, kinds)):
    define = _DEFINE.get(type(field.default), flags.DEFINE_string)
    define(
      field.name,
      field.default,
      field.metadata['help'],
      flag_values=values,
      module_name=program,
    )
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
      raise errors.UnsupportedOptionError(
        f'{unexpected[0]!r}',
        'only flags before a lone --',
        'write -- before the command',
      )
    options = [
      kind(**{f.name: values[f.name].value for f in dataclasses.fields(kind)})
      for kind in kinds
    ]
    return run(*options, list(argv[end + 1 :]))
  except KeyboardInterrupt:
    print(f'{program}: interrupted.', file=sys.stderr)
    return _INTERRUPTED
  except (
    flags.Error,
    errors.UnsupportedOptionError,
    errors.ClusterConfigError,
  ) as e:
    usage = f'{program} [flags] -- command [arguments]'
    text = _explained(e, values)
    print(f'{program}: {text}\nUsage: {usage}', file=sys.stderr)
    return 2


def _explained(error: Exception, values: flags.FlagValues) -> str:
  """Returns the message of an error, with a fix where absl names none."""
  if isinstance(error, flags.IllegalFlagValueError):
    # absl's message is 'flag --name=value: reason'.
    typed, name = re.match(r'(?s)flag (--(\w+)=.*?): ', str(error)).groups()
    expected = values[name].parser.syntactic_help or 'True or False'
    fix = f'write for instance --{name}={values[name].default}'
    return str(errors.UnsupportedOptionError(typed, expected, fix))
  if not isinstance(error, flags.UnrecognizedFlagError) or 'mean' in str(error):
    return str(error)
  typed = error.flagname.replace('-', '_')
  # --workers is nearer to --num_workers than letters say.
  meant = [name for name in values if name.endswith(f'_{typed}')]
  meant += filter(None, [option_checks.nearest(typed, list(values))])
  return f'{error}. Did you mean: {meant[0]} ?' if meant else str(error)
