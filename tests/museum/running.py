"""Runs an exhibit in its own processes and judges the result.

TensorFlow's strategies run in processes that never import `tf_strategies`. This
file imports it only in the functions that create ours.
"""

import dataclasses
import sys
from typing import Any

import tensorflow as tf

from tests import parameter_servers, processes, virtual_devices
from tests.museum import exhibits

OURS = 'ours'
STOCK = 'stock'
_ONE_DEVICE = 'one device'
# How long our strategies wait for a missing worker, in seconds.
_RENDEZVOUS_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Finding:
  """The result of an exhibit.

  Attributes:
    is_right: whether it equals one device's result, or is the expected error.
    text: the result in a few words.
  """

  is_right: bool
  text: str


def find(exhibit: exhibits.Exhibit, side: str, deadline: float) -> Finding:
  """Runs an exhibit and compares it with one device.

  Args:
    exhibit: the exhibit to run.
    side: OURS or STOCK.
    deadline: time limit of its processes, in seconds.
  """
  want = None
  if exhibit.most is None and not exhibit.error:
    with processes.ProcessGroup(deadline) as group:
      group.start_function(0, _run, (exhibit.report, _ONE_DEVICE))
      want = group.wait_for([0])[0].result()
  return judge(exhibit, want, outcomes(exhibit, side, deadline), deadline)


def outcomes(
  exhibit: exhibits.Exhibit, side: str, deadline: float
) -> list[processes.Outcome]:
  """Returns the outcomes of the processes of an exhibit that report a result."""
  args = (exhibit.report, side)
  if exhibit.setup == 'devices':
    with processes.ProcessGroup(deadline) as group:
      group.start_function(0, _run, args, exits_at_once=True)
      return group.wait_for([0])
  if exhibit.setup == 'servers':
    with parameter_servers.Job(num_workers=2, num_ps=1, deadline=deadline) as j:
      j.start_chief(_run, args)
      return [j.wait()]
  count = 1 if exhibit.setup == 'missing_worker' else 2
  with processes.Workers(
    _run_worker,
    count,
    args,
    deadline=deadline,
    ports=processes.addresses(2),
  ) as workers:
    return workers.wait()


def judge(
  exhibit: exhibits.Exhibit,
  want: Any,
  ended: list[processes.Outcome],
  deadline: float,
) -> Finding:
  """Judges an exhibit by the outcomes of its processes.

  Args:
    exhibit: the exhibit that ran.
    want: one device's numbers.
    ended: the outcome of each process.
    deadline: time limit that the processes had, in seconds.
  """
  texts = [_text(exhibit, want, outcome, deadline) for outcome in ended]
  # If one process raised, the others hang because of it.
  faults = sorted(filter(None, texts), key=lambda text: 'hangs' in text)
  if faults:
    return Finding(False, '; '.join(dict.fromkeys(faults)))
  if exhibit.error:
    return Finding(True, f'right: raises `{exhibit.error}`')
  return Finding(True, 'right')


def _text(exhibit, want, outcome, deadline):
  """Describes the fault in a process's outcome. Returns '' if there is no fault."""
  if outcome.error_text:
    kind = outcome.error_text.strip().splitlines()
    # The error's name is in the last line that is not indented.
    line = next(x for x in reversed(kind) if _names_error(x))
    name = line.partition(':')[0].rpartition('.')[2]
    return '' if name == exhibit.error else f'raises `{name}`'
  if outcome.value is None:
    if outcome.exitcode is None:
      return f'hangs (ended after {deadline:g} s)'
    return f'dies with status {outcome.exitcode}'
  if exhibit.error:
    return f'does not raise `{exhibit.error}`'
  return exhibits.fault(exhibit, want, outcome.value)


def _names_error(line):
  name = line.partition(':')[0]
  return name.replace('.', '').replace('_', '').isalnum() and name[0] > ' '


def by_report(report: str) -> exhibits.Exhibit:
  """Returns the exhibit of a report."""
  return next(x for x in exhibits.EXHIBITS if x.report == report)


def _run_worker(rank, report, side):
  del rank
  return _run(report, side)


def _run(report, side):
  """Runs an exhibit in its process and returns its numbers."""
  exhibit = by_report(report)
  virtual_devices.configure(
    exhibit.replicas if exhibit.setup == 'devices' else 1
  )
  strategy = None if side == _ONE_DEVICE else create(exhibit, side)
  found = exhibits.run(exhibit, strategy)
  # Only the part of tf_strategies that picks ports may be loaded.
  if side != OURS and 'tf_strategies._tf_internal' in sys.modules:
    raise AssertionError('tf_strategies was loaded with another strategy')
  return found


def create(exhibit: exhibits.Exhibit, side: str) -> tf.distribute.Strategy:
  """Returns the strategy of an exhibit. Runs in the exhibit's process.

  Args:
    exhibit: the exhibit to run.
    side: OURS or STOCK.
  """
  devices = virtual_devices.names(exhibit.replicas)
  if side == STOCK:
    if exhibit.setup == 'devices':
      return tf.distribute.MirroredStrategy(devices)
    if exhibit.setup == 'servers':
      return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
      )
    return tf.distribute.MultiWorkerMirroredStrategy()
  import tf_strategies as tfs

  if exhibit.setup == 'devices':
    return tfs.create_strategy('ring_mirrored', devices=devices)
  if exhibit.setup == 'servers':
    return tfs.create_strategy('parameter_server')
  group = None
  if exhibit.setup == 'missing_worker':
    group = tfs.process_group.GroupOptions(
      rendezvous_timeout_seconds=_RENDEZVOUS_SECONDS
    )
  return tfs.create_strategy(
    'multi_worker_ring',
    devices=devices[:1],
    options=tfs.RingOptions(group=group),
  )
