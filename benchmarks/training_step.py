"""A step of Keras' `fit` on two workers, with ours and TensorFlow's collectives.

  python -m benchmarks.training_step
  python -m benchmarks.training_step --link_rate=1gbit --rounds=5
  python -m benchmarks.training_step --width=64 --rounds=1 --peers=ring_8mb
  python -m benchmarks.training_step --peers=ring_adam,ring_adam_sharded

The model is dense, with 25 MB of parameters and a batch of 64 per worker. The ring sends
buckets during the backward pass, so their size determines how much of the reduction is
overlapped. The lower limits are one device without communication, on the whole batch
and on one worker's part of it.

Peers take turns in several rounds, while the processes of others are idle. A sample is
the mean step of a block. The CPU time of a step, which depends less on other programs,
is the mean of the workers. After the first round the losses of all peers and ranks must
be equal.

With --link_rate each worker runs on its own simulated host (see
benchmarks/network_namespaces.py). Peers ring_local_16 and _64 synchronise every 16
and 64 steps (tfs.keras.LocalSteps). Their blocks are multiples of that.
"""

import contextlib
import dataclasses
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# TensorFlow reads it during import.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

from absl import app, flags

from benchmarks import (
  measure,
  network_namespaces,
  processes,
  report,
  training_peers,
  worker_pool,
)
from tf_strategies.launch import ports as ports_lib

_NUM_WORKERS = flags.DEFINE_integer(
  'num_workers', 2, 'Workers, with one device each.', lower_bound=2
)
_WIDTH = flags.DEFINE_integer(
  'width', 1250, 'Units of each layer.', lower_bound=1
)
_LAYERS = flags.DEFINE_integer('layers', 4, 'Dense layers.', lower_bound=1)
_BATCH = flags.DEFINE_integer(
  'per_replica_batch_size', 64, 'Rows per worker.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns per peer.', lower_bound=1)
_BLOCKS = flags.DEFINE_integer(
  'blocks',
  4,
  'Measured blocks per turn, after one warm-up block.',
  lower_bound=1,
)
_STEPS = flags.DEFINE_integer('steps', 10, 'Steps per block.', lower_bound=1)
_PEERS = flags.DEFINE_list(
  'peers', None, f'Any of {",".join(training_peers.NAMES)}. Default: all.'
)
_LINK_RATE = flags.DEFINE_string(
  'link_rate', None, "Rate of each worker's link, such as 1gbit or 200mbit."
)
_DEADLINE_SECONDS = flags.DEFINE_float(
  'deadline_seconds',
  worker_pool.DEADLINE_SECONDS,
  'Maximum duration of a turn.',
  lower_bound=1.0,
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'JSON file for the results.'
)


class Training:
  """The processes of all peers, with their models.

  Args:
    peers: the peers.
    hosts: hosts of the workers, or None for this machine.
    stack: ends the processes at its exit.

  Attributes:
    parameter_bytes: size of the model's parameters.
    bytes_sent: bytes that the busiest rank sends per step, by peer, or None if they
      are not counted.
    cpu_seconds: CPU seconds per step and worker of each block, by peer.
  """

  def __init__(
    self,
    peers: Sequence[training_peers.Peer],
    hosts: network_namespaces.NetworkNamespaces | None,
    stack: contextlib.ExitStack,
  ):
    self._pools: dict[str, worker_pool.WorkerPool] = {}
    self._hosts = hosts
    self._addresses: dict[str, list[str]] = {}
    self.parameter_bytes = 0
    self.bytes_sent: dict[str, float | None] = {}
    self.cpu_seconds: dict[str, list[float]] = {}
    for peer in peers:
      if peer.strategy not in self._pools:
        self._pools[peer.strategy] = stack.enter_context(
          self._start(peer.strategy)
        )
    for peer in peers:
      self.parameter_bytes = self._set_up(peer)

  def run(self, peer: training_peers.Peer) -> tuple[list[float], list[float]]:
    """Trains once.

    Returns:
      Seconds per step of each block on the slowest rank, and the loss by rank.
    """
    # All blocks of a peer synchronise equally often.
    every = peer.local_steps or 1
    found = self._pools[peer.strategy].ask(
      'run',
      peer=peer.name,
      blocks=_BLOCKS.value,
      steps=-(-_STEPS.value // every) * every,
    )
    sent = [f['bytes_sent'] for f in found if f['bytes_sent'] is not None]
    self.bytes_sent[peer.name] = max(sent, default=None)
    cpu_by_rank = [f['cpu_seconds'] for f in found]
    self.cpu_seconds.setdefault(peer.name, []).extend(
      sum(block) / len(block) for block in zip(*cpu_by_rank, strict=True)
    )
    by_rank = [f['seconds'] for f in found]
    seconds = [max(block) for block in zip(*by_rank, strict=True)]
    return seconds, [f['loss'] for f in found]

  def _start(self, strategy: str) -> worker_pool.WorkerPool:
    prefixes = [()] * (1 if strategy == 'one_device' else _NUM_WORKERS.value)
    if self._hosts is not None and strategy != 'one_device':
      prefixes = [self._hosts.command(i, ()) for i in range(len(prefixes))]
    return worker_pool.WorkerPool(
      strategy,
      'benchmarks.training_actor:Actor',
      prefixes,
      deadline_seconds=_DEADLINE_SECONDS.value,
    )

  def _set_up(self, peer: training_peers.Peer) -> int:
    rows = _BATCH.value * (_NUM_WORKERS.value if peer.whole_batch else 1)
    answers = self._pools[peer.strategy].ask(
      'set_up',
      peer=peer.name,
      strategy=peer.strategy,
      options=dict(peer.options),
      addresses=self._addresses_of(peer),
      shape={
        'width': _WIDTH.value,
        'layers': _LAYERS.value,
        'batch_rows': rows,
      },
      timeout_seconds=_DEADLINE_SECONDS.value,
      optimizer=peer.optimizer,
      local_steps=peer.local_steps,
    )
    return answers[0]

  def _addresses_of(self, peer: training_peers.Peer) -> list[str]:
    # TensorFlow's runtime starts only once in a process, with one cluster.
    if peer.strategy == 'collective' and peer.strategy in self._addresses:
      return self._addresses[peer.strategy]
    count = _NUM_WORKERS.value
    hosts = ('127.0.0.1',) * count
    if self._hosts is not None:
      hosts = self._hosts.addresses
    ports = ports_lib.pick_ports(count)
    made = [f'{h}:{p}' for h, p in zip(hosts, ports, strict=True)]
    self._addresses[peer.strategy] = made
    return made


def run(peers: Sequence[training_peers.Peer]) -> dict[str, Any]:
  """Trains all peers in turns, and returns the results for the report."""
  with contextlib.ExitStack() as stack:
    hosts = None
    if _LINK_RATE.value is not None:
      hosts = stack.enter_context(
        network_namespaces.NetworkNamespaces(
          _NUM_WORKERS.value, _LINK_RATE.value
        )
      )
    _progress(f'building {len(peers)} models')
    training = Training(peers, hosts, stack)
    by_name = {peer.name: peer for peer in peers}
    seconds = {name: [] for name in by_name}
    for number, order in enumerate(measure.turns(by_name, _ROUNDS.value), 1):
      _progress(f'round {number} of {_ROUNDS.value}')
      losses = {}
      for name in order:
        samples, losses[name] = training.run(by_name[name])
        seconds[name] += samples
      if number == 1:
        training_peers.check_losses(losses)
    cpu = {
      name: measure.Spread.of(samples).median_ms
      for name, samples in training.cpu_seconds.items()
    }
  return {
    'parameter_bytes': training.parameter_bytes,
    'results': [
      {
        **_record(peer, seconds),
        'median_cpu_ms': cpu[peer.name],
        'megabytes_sent': _megabytes(training.bytes_sent[peer.name]),
      }
      for peer in peers
    ],
  }


def _megabytes(count: float | None) -> float | None:
  return None if count is None else count / 1e6


def _record(peer, seconds) -> dict[str, Any]:
  spread = measure.Spread.of(seconds[peer.name])
  ratio = None
  if training_peers.REFERENCE in seconds:
    ratio = (
      spread.median_ms
      / measure.Spread.of(seconds[training_peers.REFERENCE]).median_ms
    )
  return {
    'peer': peer.name,
    **dataclasses.asdict(spread),
    f'ratio_to_{training_peers.REFERENCE}': ratio,
    'seconds': seconds[peer.name],
  }


def table(records: Sequence[Mapping[str, Any]]) -> str:
  """Returns the records as a Markdown table."""
  columns = {
    'peer': 'peer',
    'median ms a step': 'median_ms',
    'p10 ms': 'p10_ms',
    'p90 ms': 'p90_ms',
    f'to {training_peers.REFERENCE}': f'ratio_to_{training_peers.REFERENCE}',
    'CPU ms of a worker': 'median_cpu_ms',
    'MB sent a step': 'megabytes_sent',
  }
  return report.markdown(
    list(columns), [[r[key] for key in columns.values()] for r in records]
  )


def _chosen() -> list[training_peers.Peer]:
  names = _PEERS.value or training_peers.NAMES
  unknown = sorted(set(names) - set(training_peers.NAMES))
  if unknown:
    raise app.UsageError(
      f'--peers: {unknown[0]!r} is none of {", ".join(training_peers.NAMES)}.'
    )
  return [peer for peer in training_peers.PEERS if peer.name in names]


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
  """Runs the benchmark."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  report.check_target('report_json', _REPORT_JSON.value)
  peers = _chosen()
  if _LINK_RATE.value is not None:
    network_namespaces.bits_per_second(_LINK_RATE.value)  # Reports a typo now.
  # The workers authenticate with it, also beyond loopback.
  os.environ.setdefault('TFS_SECRET', secrets.token_hex(16))
  settings = (
    *(_NUM_WORKERS, _WIDTH, _LAYERS, _BATCH, _ROUNDS, _BLOCKS, _STEPS),
    _LINK_RATE,
  )
  content = {
    'benchmark': 'training_step',
    **report.environment(),
    'settings': {flag.name: flag.value for flag in settings},
  }
  with processes.ended_by_signals():
    content |= run(peers)
  print(
    f'\n{_NUM_WORKERS.value} workers, {content["parameter_bytes"] / 1e6:.1f} MB '
    f'of parameters\n\n{table(content["results"])}',
    flush=True,
  )
  if _REPORT_JSON.value:
    report.write_json(_REPORT_JSON.value, content)


if __name__ == '__main__':
  app.run(main)
