"""All-reduce between the devices of one process: ours and TensorFlow's.

  python -m benchmarks.all_reduce
  python -m benchmarks.all_reduce --num_devices=4 --sets=resnet --rounds=10
  python -m benchmarks.all_reduce --quick --report_json=all_reduce.json

Every peer runs the same step under `tf.distribute.MirroredStrategy`: a
`tf.function` with one `replica_context.all_reduce` over all tensors of the set.
Only the `cross_device_ops` differ. `identity` is the step without the
all-reduce, as the lower limit. The tensors are on their devices beforehand.
Every peer's sums are compared with the exact ones before the measurement. The
peers take turns. Each combination of set and number of devices has its own
process.
"""

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

# TensorFlow reads it during import.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from benchmarks import measure, peers, report, tensor_sets

_DEVICE = flags.DEFINE_enum(
  'device', 'cpu', ['cpu', 'gpu'], 'GPUs are virtual if there is only one.'
)
_NUM_DEVICES = flags.DEFINE_list(
  'num_devices', None, 'Numbers of devices. Default: 2,4,8; quick: 2,4.'
)
_SETS = flags.DEFINE_list(
  'sets',
  None,
  "Tensor sets: 'resnet', or count and size. Default: "
  '1x25MB,25x1MB,resnet; quick: 1x256KB,4x64KB.',
)
_ROUNDS = flags.DEFINE_integer(
  'rounds', None, 'Turns of each peer. Default: 7; quick: 2.', lower_bound=1
)
_REPEATS = flags.DEFINE_integer(
  'repeats', 3, 'Timed calls in each turn.', lower_bound=1
)
_QUICK = flags.DEFINE_boolean('quick', False, 'Small defaults.')
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'JSON file for the results.'
)

# Sums of at most 16 of these are exact in float32.
_POSITIONS = 8191


@dataclasses.dataclass(frozen=True)
class Step:
  """The compiled step of a peer.

  Attributes:
    peer: the peer.
    call: reduces all tensors and returns the first element of each sum,
      `[replica][tensor]`, so that each replica uses its sums. TensorFlow would
      route whole results through the first device.
    results: reduces all tensors and returns the sums, `[tensor][replica]`.
    ops: the cross-device op, or None for TensorFlow's default.
  """

  peer: peers.Peer
  call: Callable[[], list]
  results: Callable[[], list]
  ops: tf.distribute.CrossDeviceOps | None


def input_value(rank: int, shape: Sequence[int]) -> np.ndarray:
  """Returns the tensor of `rank`: integers that differ by rank and position."""
  size = int(np.prod(shape))
  return (
    (np.arange(size) % _POSITIONS + rank * _POSITIONS)
    .astype(np.float32)
    .reshape(shape)
  )


def place_inputs(shapes, devices: Sequence[str]) -> list[list[tf.Variable]]:
  """Returns `[replica][tensor]`, each value on its replica's device.

  They are variables, because a `tf.function` turns small tensors into constants
  and computes their sum during tracing.
  """
  inputs = []
  for rank, device in enumerate(devices):
    with tf.device(device):
      inputs.append([tf.Variable(input_value(rank, s)) for s in shapes])
  return inputs


def build_step(
  peer: peers.Peer,
  devices: Sequence[str],
  inputs: list[list[tf.Variable]],
  strategies: dict[str, tuple[tf.distribute.Strategy, Any]],
) -> Step:
  """Returns the peer's step over `inputs`, under a `MirroredStrategy`.

  Adds each peer's strategy and cross-device op to `strategies`, for the next set.
  """
  if peer.name not in strategies:
    ops = peer.make_ops() if peer.make_ops else None
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=ops)
    strategies[peer.name] = strategy, ops
  strategy, ops = strategies[peer.name]

  def read(context):
    replica_id = context.replica_id_in_sync_group
    # Reads of variables would otherwise all run on the first device.
    with tf.device(devices[replica_id]):
      return [v.read_value() for v in inputs[replica_id]]

  def reduce(tensors):
    if peer.kind == peers.FLOOR:
      return tensors
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)

  def reduce_and_use(tensors):
    return tf.stack([tf.reshape(t, [-1])[0] for t in reduce(tensors)])

  def run(replica_step):
    values = strategy.experimental_distribute_values_from_function(read)
    return strategy.run(replica_step, args=(values,))

  @tf.function
  def results():
    reduced = [strategy.experimental_local_results(t) for t in run(reduce)]
    _check_devices(peer, reduced, devices)
    return reduced

  @tf.function
  def step():
    return strategy.experimental_local_results(run(reduce_and_use))

  # A function may return before the GPU finishes. `numpy` waits for it.
  return Step(peer, lambda: [t.numpy() for t in step()], results, ops)


def _check_devices(peer, reduced, devices):
  """Raises, during tracing, if a sum is on another device than its replica."""
  for index, replicas in enumerate(reduced):
    for tensor, device in zip(replicas, devices, strict=True):
      if not tensor.device.endswith(device):
        raise RuntimeError(
          f'{peer.name}: the sum of tensor {index} is on {tensor.device!r} '
          f'instead of {device}.'
        )


def check(step: Step, shapes, devices: Sequence[str]) -> None:
  """Compares the results of every replica with the exact sums.

  Raises:
    RuntimeError: if a result differs.
  """
  outputs = step.results()
  firsts = step.call()
  for index, (shape, replicas) in enumerate(zip(shapes, outputs, strict=True)):
    expected = sum(input_value(r, shape) for r in range(len(devices)))
    for rank, output in enumerate(replicas):
      if step.peer.kind == peers.FLOOR:
        expected = input_value(rank, shape)
      right = np.array_equal(output.numpy(), expected)
      if not right or firsts[rank][index] != expected.flat[0]:
        raise RuntimeError(
          f'{step.peer.name}: tensor {index} of replica {rank} of '
          f'{len(devices)} is wrong. Its time would mean nothing.'
        )


def busiest_bytes_in(step: Step, shapes, num_devices: int) -> int:
  """Returns the bytes into the busiest device, by our plan or the peer's formula."""
  if step.peer.busiest_bytes_in is None:
    return max(step.ops.last_bytes_in)
  sizes = [4 * int(np.prod(shape)) for shape in shapes]
  return step.peer.busiest_bytes_in(sizes, num_devices)


def run_set(
  name: str, num_devices: int, rounds: int, repeats: int, device: str = 'cpu'
) -> list[dict[str, object]]:
  """Runs `measure_set` in this process, which must not have created devices yet."""
  devices = measure.split_device(device, num_devices)
  return measure_set(name, devices, rounds, repeats, {})


def measure_set(
  name: str,
  devices: Sequence[str],
  rounds: int,
  repeats: int,
  strategies: dict[str, tuple[tf.distribute.Strategy, Any]],
) -> list[dict[str, object]]:
  """Measures every peer on one tensor set.

  All sets of a process need the same devices and the same `strategies`.
  TensorFlow's collectives number groups and instances by strategy, but store
  their sizes and shapes by process. A second default `MirroredStrategy` would
  join the group of the first one, and abort if they differ.

  Args:
    name: name of the tensor set.
    devices: devices to reduce over.
    rounds: number of turns of each peer.
    repeats: number of timed calls in each turn.
    strategies: strategies by peer. Empty for the first set of the process.

  Returns:
    One record for each peer, in the format of the JSON report.
  """
  # Strategies log their devices, and peers their algorithms.
  logging.set_verbosity(logging.ERROR)
  num_devices = len(devices)
  shapes = tensor_sets.by_name(name)
  inputs = place_inputs(shapes, devices)
  steps = []
  for peer in peers.for_devices(num_devices):
    _progress(f'{num_devices} devices, {name}: building {peer.name}')
    step = build_step(peer, devices, inputs, strategies)
    check(step, shapes, devices)
    steps.append(step)
  _progress(f'{num_devices} devices, {name}: {rounds} rounds')
  seconds = measure.take_turns(
    {step.peer.name: step.call for step in steps}, rounds, repeats
  )
  return _records(name, shapes, num_devices, steps, seconds)


def _records(name, shapes, num_devices, steps, seconds):
  """Returns one record for each peer, in the format of the JSON report."""
  spreads = {n: measure.Spread.of(s) for n, s in seconds.items()}
  fastest = min(
    spreads[s.peer.name].median_ms
    for s in steps
    if s.peer.kind == peers.BUILT_IN
  )
  num_bytes = sum(4 * int(np.prod(shape)) for shape in shapes)
  records = []
  for step in steps:
    spread = spreads[step.peer.name]
    algorithm_bandwidth = num_bytes / spread.median_ms / 1e6
    records.append(
      {
        'num_devices': num_devices,
        'set': name,
        'num_tensors': len(shapes),
        'num_bytes': num_bytes,
        'peer': step.peer.name,
        'kind': step.peer.kind,
        **dataclasses.asdict(spread),
        'ratio_to_fastest_built_in': spread.median_ms / fastest,
        # Both as defined by nccl-tests.
        'algorithm_bandwidth_gb_per_s': algorithm_bandwidth,
        'bus_bandwidth_gb_per_s': algorithm_bandwidth
        * (2 * (num_devices - 1) / num_devices),
        'busiest_bytes_in': busiest_bytes_in(step, shapes, num_devices),
      }
    )
  return records


def table(records: Sequence[dict[str, object]]) -> str:
  """Returns the records of one tensor set as a Markdown table."""
  rows = [
    [
      r['peer'],
      r['median_ms'],
      r['p10_ms'],
      r['p90_ms'],
      r['ratio_to_fastest_built_in'],
      r['bus_bandwidth_gb_per_s'],
      r['busiest_bytes_in'] / 1e6,
    ]
    for r in records
  ]
  return report.markdown(
    [
      'peer',
      'median ms',
      'p10 ms',
      'p90 ms',
      'to fastest built-in',
      'bus GB/s',
      'MB into busiest',
    ],
    rows,
  )


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _world_sizes() -> list[int]:
  texts = _NUM_DEVICES.value or (
    ['2', '4'] if _QUICK.value else ['2', '4', '8']
  )
  if not all(text.isdecimal() and int(text) > 1 for text in texts):
    raise app.UsageError(
      f'--num_devices={",".join(texts)}: write integers of 2 or more, such '
      'as 2,4,8.'
    )
  return [int(text) for text in texts]


def main(argv: Sequence[str]) -> None:
  """Runs the benchmark."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  report.check_target('report_json', _REPORT_JSON.value)
  world_sizes = _world_sizes()
  names = _SETS.value or (
    ['1x256KB', '4x64KB'] if _QUICK.value else ['1x25MB', '25x1MB', 'resnet']
  )
  for name in names:
    tensor_sets.by_name(name)  # Reports a typo before the measurement.
  rounds = _ROUNDS.value or (2 if _QUICK.value else 7)
  content = {
    'benchmark': 'all_reduce',
    **report.environment(),
    'settings': {
      'device': _DEVICE.value,
      'rounds': rounds,
      'repeats': _REPEATS.value,
    },
    'results': [],
  }
  for num_devices, name in itertools.product(world_sizes, names):
    records = measure.in_a_process(
      run_set, name, num_devices, rounds, _REPEATS.value, _DEVICE.value
    )
    print(f'\n{num_devices} devices, {name}\n\n{table(records)}', flush=True)
    content['results'] += records
  if _REPORT_JSON.value:
    report.write_json(_REPORT_JSON.value, content)


if __name__ == '__main__':
  app.run(main)
