"""From the command line to an exit code, the same for every example.

Exit codes: 0; 1 for options, data or checkpoints that cannot be used, with a
message; 2 if the test accuracy is below --min_accuracy; 143 after a preemption
or the loss of a worker: it is worth while to start it again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from absl import app, flags

import tf_strategies as tfs
from examples import common_flags, mnist_common, training_report
from tf_strategies.cluster import exit_codes

Train = Callable[
  [common_flags.TrainingOptions, Sequence[str] | None], dict[str, object] | None
]
Parse = Callable[[flags.FlagValues], common_flags.TrainingOptions]


def run(
  train: Train,
  define: Callable[[], None] = common_flags.define,
  parse: Parse = common_flags.parse,
) -> None:
  """Runs a program that trains as its flags say; never returns.

  Args:
    train: called with the options and the names of the devices to use (None
      for all); returns the report, or None where this process did not train.
    define: defines the flags.
    parse: makes the options of them.
  """
  define()
  app.run(lambda argv: main(argv, train, flags.FLAGS, parse))


def main(
  argv: Sequence[str],
  train: Train,
  flag_values: flags.FlagValues,
  parse: Parse = common_flags.parse,
) -> int:
  """Trains, prints the summary and writes the report; returns the exit code."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {" ".join(argv[1:])}')
  try:
    options = parse(flag_values)
    devices = None
    if 'num_virtual_devices' in flag_values:
      devices = mnist_common.split_device(flag_values.num_virtual_devices)
    report = train(options, devices)
  except tfs.errors.Error as e:
    # Meant for the user, who needs no traceback to understand it.
    print(f'{type(e).__name__}: {e}', file=sys.stderr)
    return exit_codes.exit_code(e)
  if report is None or not report['is_chief']:
    return 0
  print(training_report.summary(report))
  if flag_values.report_json:
    training_report.write_json(report, flag_values.report_json)
  accuracy = report['test']['accuracy']
  least = flag_values.min_accuracy
  if least is not None and accuracy < least:
    print(
      f'Test accuracy {accuracy:.4f} is below --min_accuracy={least}.',
      file=sys.stderr,
    )
    return 2
  return 0
