"""Training over slow links: time of a step, bytes, and time to a test loss.

  python -m benchmarks.slow_links --data_path=mnist.npz
  python -m benchmarks.slow_links --data_path=mnist.npz --link_rates=100mbit \
    --peers=none,int8 --torch_python=/path/to/python

Two workers on hosts of their own (benchmarks/network_namespaces.py; needs root) train a
dense net on MNIST with Adam, by what is exact and by what sends less, beside PyTorch's
DistributedDataParallel over gloo, with its hooks, where --torch_python has torch. Every
64 steps all look at the test loss, outside of the time. 'to loss' is the time of training
until a look finds the loss that was asked for. Peers run one after the other.
"""

import dataclasses
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# TensorFlow reads it when it is imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

from absl import app, flags

from benchmarks import (
  network_namespaces,
  processes,
  report,
  slow_link_task,
  worker_pool,
)
from tf_strategies.launch import ports as ports_lib

_RATES = flags.DEFINE_list(
  'link_rates', '100mbit,1gbit', "Rates of each host's link."
)
_NUM_WORKERS = flags.DEFINE_integer(
  'num_workers', 2, 'Hosts of a worker each.', lower_bound=2
)
_DATA_PATH = flags.DEFINE_string(
  'data_path', None, 'MNIST as an npz file.', required=True
)
_BATCH = flags.DEFINE_integer(
  'global_batch_size', 256, 'Rows of a step.', lower_bound=1
)
_LOOKS = flags.DEFINE_integer(
  'looks', 12, 'How often the test loss is looked at.', lower_bound=1
)
_LOSS = flags.DEFINE_float('loss', 0.1, 'The test loss to reach.')
_TORCH_PYTHON = flags.DEFINE_string(
  'torch_python', None, 'An interpreter that has torch.'
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'Where to write the results as JSON.'
)


@dataclasses.dataclass(frozen=True)
class Peer:
  """One way to train.

  Attributes:
    name: for flags, tables and JSON.
    options: of its actor's `train`.
    is_torch: whether it needs torch.
  """

  name: str
  options: Mapping[str, Any]
  is_torch: bool = False


PEERS = (
  Peer('none', {}),
  Peer('bfloat16', {'compression': 'bfloat16'}),
  Peer('int8', {'compression': 'int8'}),
  Peer('local_16', {'local_steps': 16}),
  Peer('local_64', {'local_steps': 64}),
  Peer('ddp', {}, is_torch=True),
  Peer('ddp_bfloat16', {'bfloat16': True}, is_torch=True),
)
_PEERS = flags.DEFINE_list(
  'peers', None, f'Which of {",".join(p.name for p in PEERS)}. Default: all.'
)


def run(peer: Peer, rate: str, seed: int = 1) -> dict[str, Any]:
  """Trains once, on hosts with links of a rate."""
  with network_namespaces.NetworkNamespaces(_NUM_WORKERS.value, rate) as hosts:
    ports = ports_lib.pick_ports(_NUM_WORKERS.value)
    prefixes = [hosts.command(i, ()) for i in range(_NUM_WORKERS.value)]
    kind, python, env = 'ours', sys.executable, {}
    if peer.is_torch:
      kind, python, env = 'torch', _TORCH_PYTHON.value, {'PYTHONPATH': ''}
    with worker_pool.WorkerPool(
      peer.name,
      f'benchmarks.slow_link_{kind}:Actor',
      prefixes,
      python,
      env=env,
    ) as pool:
      found = pool.ask(
        'train',
        addresses=[
          f'{h}:{p}' for h, p in zip(hosts.addresses, ports, strict=True)
        ],
        data_path=os.path.abspath(_DATA_PATH.value),
        global_batch_size=_BATCH.value,
        steps=_LOOKS.value * slow_link_task.STEPS_A_LOOK,
        seed=seed,
        options=peer.options,
      )
  return slow_link_task.summary(peer.name, rate, found, _LOSS.value)


def table(results: Sequence[Mapping[str, Any]]) -> str:
  """One row for each peer and rate."""

  def row(result):
    first = next(r for r in results if r['link_rate'] == result['link_rate'])
    to_loss = result['seconds_to_loss']
    return [
      result['link_rate'],
      result['peer'],
      result['mean_ms'],
      result['mean_ms'] / first['mean_ms'],
      result['kb_a_step'],
      result['kb_a_step'] / first['kb_a_step'],
      '' if to_loss is None else f'{to_loss:.1f}',
      f'{result["final_loss"]:.4f}',
    ]

  columns = ['link', 'peer', 'ms a step', 'to first', 'kB a step', 'to first']
  columns += [f's to a loss of {_LOSS.value:g}', 'last test loss']
  return report.markdown(columns, [row(result) for result in results])


def _chosen() -> list[Peer]:
  names = _PEERS.value or [p.name for p in PEERS]
  unknown = sorted(set(names) - {p.name for p in PEERS})
  if unknown:
    raise app.UsageError(
      f'--peers: {unknown[0]!r} is none of {", ".join(p.name for p in PEERS)}.'
    )
  chosen = [p for p in PEERS if p.name in names]
  if _TORCH_PYTHON.value is None:
    print('Without --torch_python: without DistributedDataParallel.')
    chosen = [p for p in chosen if not p.is_torch]
  return chosen


def main(argv: Sequence[str]) -> None:
  """Runs the benchmark that the flags describe."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  report.check_target('report_json', _REPORT_JSON.value)
  for rate in _RATES.value:
    network_namespaces.bits_per_second(rate)
  chosen = _chosen()
  os.environ.setdefault('TFS_SECRET', secrets.token_hex(16))
  content = {
    'benchmark': 'slow_links',
    **report.environment(),
    'settings': {'loss': _LOSS.value, 'global_batch_size': _BATCH.value},
  }
  results = []
  with processes.ended_by_signals():
    for rate in _RATES.value:
      for peer in chosen:
        print(f'{rate}: {peer.name}', file=sys.stderr, flush=True)
        results.append(run(peer, rate))
  print(table(results))
  if _REPORT_JSON.value:
    report.write_json(_REPORT_JSON.value, content | {'results': results})


if __name__ == '__main__':
  app.run(main)
