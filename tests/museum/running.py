"""Runs an exhibit in processes of its own, and says what came of it.

TensorFlow's strategies run in processes that never import `tf_strategies`: this
file imports it only inside of the functions that make ours.
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
# How long ours waits for a worker that never comes, in seconds.
_RENDEZVOUS_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Finding:
  """What came of an exhibit.

  Attributes:
    is_right: whether it is what one device gives, or the error that is right.
    text: in a few words.
  """

  is_right: bool
  text: str


def find(exhibit: exhibits.Exhibit, side: str, deadline: float) -> Finding:
  """Runs an exhibit and compares it with one device.

  Args:
    exhibit: which.
    side: OURS or STOCK.
    deadline: of its processes, in seconds.
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
  """How each process of an exhibit ended that has something to say."""
  args = (exhibit.report, side)
  if exhibit.place == 'devices':
    with processes.ProcessGroup(deadline) as group:
      group.start_function(0, _run, args, exits_at_once=True)
      return group.wait_for([0])
  if exhibit.place == 'servers':
    with parameter_servers.Job(num_workers=2, num_ps=1, deadline=deadline) as j:
      j.start_chief(_run, args)
      return [j.wait()]
  count = 1 if exhibit.place == 'half' else 2
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
  """What the ends of the processes of an exhibit mean.

  Args:
    exhibit: which.
    want: one device's numbers.
    ended: how each process ended.
    deadline: that they had, in seconds.
  """
  texts = [_text(exhibit, want, outcome, deadline) for outcome in ended]
  # One that raised is why the others wait.
  faults = sorted(filter(None, texts), key=lambda text: 'hangs' in text)
  if faults:
    return Finding(False, '; '.join(dict.fromkeys(faults)))
  if exhibit.error:
    return Finding(True, f'right: raises `{exhibit.error}`')
  return Finding(True, 'right')


def _text(exhibit, want, outcome, deadline):
  """What is wrong with how a process ended, if anything is."""
  if outcome.error_text:
    kind = outcome.error_text.strip().splitlines()
    # The last line that is not indented begins with the error's name.
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
  """The exhibit of a report."""
  return next(x for x in exhibits.EXHIBITS if x.report == report)


def _run_worker(rank, report, side):
  del rank
  return _run(report, side)


def _run(report, side):
  """In a process of an exhibit."""
  exhibit = by_report(report)
  virtual_devices.configure(
    exhibit.replicas if exhibit.place == 'devices' else 1
  )
  strategy = None if side == _ONE_DEVICE else create(exhibit, side)
  found = exhibits.run(exhibit, strategy)
  if side != OURS and 'tf_strategies' in sys.modules:
    raise AssertionError('tf_strategies changes what is compared with it')
  return found


def create(exhibit: exhibits.Exhibit, side: str) -> tf.distribute.Strategy:
  """The strategy of an exhibit, in a process of it.

  Args:
    exhibit: which.
    side: OURS or STOCK.
  """
  devices = virtual_devices.names(exhibit.replicas)
  if side == STOCK:
    if exhibit.place == 'devices':
      return tf.distribute.MirroredStrategy(devices)
    if exhibit.place == 'servers':
      return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
      )
    return tf.distribute.MultiWorkerMirroredStrategy()
  import tf_strategies as tfs

  if exhibit.place == 'devices':
    return tfs.create_strategy('ring_mirrored', devices=devices)
  if exhibit.place == 'servers':
    return tfs.create_strategy('parameter_server')
  group = None
  if exhibit.place == 'half':
    group = tfs.process_group.GroupOptions(
      rendezvous_timeout_seconds=_RENDEZVOUS_SECONDS
    )
  return tfs.create_strategy(
    'multi_worker_ring',
    devices=devices[:1],
    options=tfs.RingOptions(group=group),
  )
