"""What a benchmark's report says, as the tables that documents show.

A program prints a row for each peer, to read while it runs. Here the peers stand beside
each other, with the ratios that matter. Every figure is the report's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.strategy_costs import results as strategy_results

Report = Mapping[str, Any]

# Names of peers in tables, in this order, and the comparison that each makes.
_BETWEEN_PROCESSES = {
  'ours_memory': 'Ours',
  'ours_tcp': 'over TCP',
  'ours_in_graph': 'in a graph',
  'ours_mpi': 'over MPI',
  'mpich': 'MPICH',
  'gloo': 'gloo',
  'mwms_ring': 'MWMS',
}
_PROCESS_RATIOS = (
  ('ours_memory', 'gloo'),
  ('ours_memory', 'mpich'),
  ('ours_in_graph', 'gloo'),
  ('ours_in_graph', 'mwms_ring'),
)
_MODELS = {
  'cnn': 'convolutional',
  'layers_50': '50 small variables',
  'mlp_25mb': 'two matrices of 12.5 MB',
  'mlp_25mb_50': '25 MB in 50 variables',
}
# What a variant of `input_pipeline` is compared with.
_BY_HAND = {'make_dataset': 'naive_arrays', 'make_dataset_tfrecords': 'naive'}
_NO_COMMUNICATION, _REFERENCE = 'no_communication', 'collective'
_SPREAD = 'p90 ÷ median, most'


def short(value: float | None) -> str:
  """Three digits.

  Example:

    >>> [short(v) for v in (0.2451, 3.9, 268.4, 10493.7, None)]
    ['0.245', '3.90', '268', '10,494', '']
  """
  if value is None:
    return ''
  if abs(value) >= 100:
    return f'{value:,.0f}'
  return f'{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}'


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
  """Returns a table without the columns that were not measured."""
  kept = [
    i
    for i in range(len(columns))
    if any(row[i] not in ('', None) for row in rows)
  ]
  return report.markdown(
    [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
  )


def _ratio(above: float | None, below: float | None) -> str:
  return f'{above / below:.2f}' if above is not None and below else ''


def _spread(found: Sequence[Mapping[str, Any]]) -> str:
  return f'{max(f["p90_ms"] / f["median_ms"] for f in found):.2f}'


def _by(records: Sequence[Mapping[str, Any]], *keys: str) -> dict[tuple, dict]:
  """The records of each case, by peer, in the order of the report."""
  cases: dict[tuple, dict] = {}
  for found in records:
    case = tuple(found[key] for key in keys)
    cases.setdefault(case, {})[found['peer']] = found
  return cases


def all_reduce(content: Report) -> str:
  """A row for each number of devices and set of tensors."""
  rows = []
  cases = _by(content['results'], 'num_devices', 'set')
  for (devices, name), peers in cases.items():
    auto, ring, default = (
      peers[n] for n in ('AutoAllReduce', 'ring', 'default')
    )
    fastest = min(
      (p for p in peers.values() if p['kind'] == 'built_in'),
      key=lambda p: p['median_ms'],
    )
    count, _, size = name.partition('x')
    tensors = f'{count} x {size[:-2]} {size[-2:]}'
    if name == 'resnet':
      megabytes = auto['num_bytes'] / 1e6
      tensors = f'{auto["num_tensors"]} of a ResNet, {megabytes:.0f} MB'
    least = 2 * (devices - 1) / devices * ring['num_bytes']
    shown = (auto, ring, fastest, default)
    rows.append(
      [
        f'{devices}, {tensors}',
        *(short(p['median_ms']) for p in shown),
        _ratio(auto['median_ms'], fastest['median_ms']),
        _ratio(default['median_ms'], ring['median_ms']),
        _spread(shown),
        f'{ring["busiest_bytes_in"] / least:.3f}',
      ]
    )
  columns = [
    *('Devices, tensors', 'Auto', 'Ring', 'fastest built-in', 'default'),
    *('Auto ÷ fastest', 'default ÷ Ring', _SPREAD),
    'bytes into a device, Ring ÷ least',
  ]
  return report.markdown(columns, rows)


def process_all_reduce(content: Report) -> str:
  """A row for each number of processes and size."""
  results = content['results']
  peers = [n for n in _BETWEEN_PROCESSES if n in results[0]['peers']]
  pairs = [pair for pair in _PROCESS_RATIOS if {*pair} <= {*peers}]
  rows = []
  for found in results:
    of = {name: found['peers'][name] for name in peers}
    megabytes = found['num_bytes'] / 1e6
    size = f'{megabytes:.0f} MB'
    if megabytes < 1:
      size = f'{found["num_bytes"] / 1e3:.0f} kB'
    rows.append(
      [
        f'{found["world_size"]}, {size}',
        *(short(of[name]['median_ms']) for name in peers),
        *(_ratio(of[a]['median_ms'], of[b]['median_ms']) for a, b in pairs),
        _spread([*of.values()]),
      ]
    )
  names = _BETWEEN_PROCESSES
  columns = [
    'Processes, size',
    *(names[name] for name in peers),
    *(f'{names[a]} ÷ {names[b]}' for a, b in pairs),
    _SPREAD,
  ]
  return _table(columns, rows)


def training_step(content: Report) -> str:
  """A row for each peer."""
  medians = {f['peer']: f['median_ms'] for f in content['results']}
  apart, reference = (medians.get(n) for n in (_NO_COMMUNICATION, _REFERENCE))
  rows = []
  for found in content['results']:
    name, median = found['peer'], found['median_ms']
    added = ''
    if apart and reference and not name.startswith('one_device'):
      added = _ratio(median - apart, reference - apart)
    rows.append(
      [
        *(f'`{name}`', short(median)),
        *(short(found['p10_ms']), short(found['p90_ms'])),
        *(_ratio(median, reference), added),
        *(short(found['median_cpu_ms']), short(found['megabytes_sent'])),
      ]
    )
  columns = [
    *('Peer', 'ms a step', 'p10', 'p90', f'÷ `{_REFERENCE}`'),
    *(f'added ÷ what `{_REFERENCE}` adds', 'CPU ms of a worker', 'MB sent'),
  ]
  return _table(columns, rows)


def recovery(content: Report) -> str:
  """A row for each peer."""
  names = {'ours': '`tfs.elastic`'}
  times = ('median_s', 'p90_s', 'p99_s', 'most_s')
  return report.markdown(
    [
      *('Peer', 'kills', 'median s', '90 %', '99 %', 'max'),
      *('step ms', 'rejoin s'),
    ],
    [
      [
        *(names[found['peer']], found['kills']),
        *(f'{found[name]:.3f}' for name in times),
        f'{found["median_step_ms"]:.1f}',
        f'{found["median_rejoin_s"]:.1f}',
      ]
      for found in content['results']
    ],
  )


def parameter_server(content: Report) -> str:
  """A row for each case."""
  rows = []
  for case in content['results']:
    peers = {found['peer']: found for found in case['peers']}
    stock, ours, fed = (peers.get(n) for n in ('stock', 'ours', 'ours_fed'))
    lost = [
      f'{p["steps_per_turn"] - p["iterations"]} of {p["steps_per_turn"]}'
      if p
      else ''
      for p in (stock, ours)
    ]
    rows.append(
      [
        _MODELS[case['model']],
        *(case['num_workers'], case['steps_per_execution']),
        *(_rates(p) for p in (stock, ours, fed)),
        _ratio(*(p and p['steps_per_s']['median'] for p in (ours, stock))),
        *lost,
      ]
    )
  columns = [
    *('Model', 'Workers', 'Steps a call', 'TensorFlow, steps/s'),
    *('`fit`, steps/s', '`fit`, fed', '`fit` ÷ TensorFlow'),
    *('counts lost, TensorFlow', '`fit`'),
  ]
  return _table(columns, rows)


def _rates(found: Mapping[str, Any] | None) -> str:
  """The median, and the least and the most."""
  if not found:
    return ''
  rate = found['steps_per_s']
  return f'{rate["median"]:.1f} ({rate["least"]:.1f} to {rate["most"]:.1f})'


def strategies(content: Report) -> str:
  """A row for each strategy."""
  devices = content['settings']['num_virtual_devices']
  return strategy_results.table(content['costs'], devices)


def input_pipeline(content: Report) -> str:
  """A row for each variant that did not fail."""
  measured = {row['name']: row for row in content['rows'] if row['rates']}
  rows = []
  for name, row in measured.items():
    peer = measured.get(_BY_HAND.get(name, ''))
    rows.append(
      [
        *(f'`{name}`', short(row['items_per_s'])),
        *(short(min(row['rates'])), short(max(row['rates']))),
        peer and f'{row["items_per_s"] / peer["items_per_s"]:.1f}',
        peer and f'`{peer["name"]}`',
      ]
    )
  columns = [
    *('Variant', 'Items/s', 'slowest round', 'fastest'),
    *('times as many', 'as'),
  ]
  return _table(columns, rows)


def start_up(content: Report) -> str:
  """A row for each model, strategy and number of devices."""
  figures = ('first CPU s', 'first wall s', 'retrace CPU s', 'first MB')
  rows = [
    [
      *(row['model'], f'`{row["strategy"]}`', row['devices']),
      *(short(row[name]) for name in figures),
      *(f'{row[name]:.2f}' for name in ('CPU ratio', 'MB ratio')),
    ]
    for row in content['rows']
  ]
  columns = [
    *('Model', 'Strategy', 'CPUs', 'First step, CPU s', 'Seconds'),
    *('With other rows, CPU s', 'MB', 'CPU time, ratio', 'MB, ratio'),
  ]
  return _table(columns, rows)


# By benchmark: the part of the report that its table shows, and what writes it.
TABLES: dict[str, tuple[str, Callable[[Report], str]]] = {
  'all_reduce': ('results', all_reduce),
  'process_all_reduce': ('results', process_all_reduce),
  'training_step': ('results', training_step),
  'recovery': ('results', recovery),
  'parameter_server': ('results', parameter_server),
  'strategies': ('costs', strategies),
  'input_pipeline': ('rows', input_pipeline),
  'start_up': ('rows', start_up),
}
