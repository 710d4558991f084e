"""The part `links` of `benchmarks.gpu`: what copies cost, and how good choices are.

Measures the constants of `tf_strategies.cross_device.links`, and, by size, how much
longer `AutoAllReduce` takes than the fastest of the algorithms that it chooses from.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import measure, report

# Copies in a chain, one after the other. What a call costs besides drops out of
# the difference between two chains.
_FEW, _MANY = 2, 12
_AUTO = 'AutoAllReduce'


def measure_copies(
  device: str, sizes: Sequence[int], rounds: int, repeats: int = 5
) -> list[dict[str, Any]]:
  """Alpha and beta of a copy between two devices, and between host and device.

  In a process that has done nothing yet. A copy is one of TensorFlow's in a graph,
  with what the runtime adds: that is what each message of a schedule costs.

  Args:
    device: 'cpu' or 'gpu'; parts of the first one, if there is one GPU.
    sizes: bytes.
    rounds: turns of each size.
    repeats: timed calls in each turn.
  """
  # TensorFlow is imported late: it reads its environment then.
  import tensorflow as tf

  from tf_strategies.cross_device import links

  # It would take away a copy that leads back.
  tf.config.optimizer.set_experimental_options({'disable_meta_optimizer': True})
  first, second = measure.split_device(device, 2)
  ways = {
    ends: links.name_of(ends) if device == 'gpu' else device
    for ends in ((first, second), (second, 'CPU:0'))
  }
  chains = {
    (ends, size, count): _chain(ends, size, count)
    for ends, size, count in itertools.product(ways, sizes, (_FEW, _MANY))
  }
  seconds = {
    key: float(np.median(found))
    for key, found in measure.take_turns(chains, rounds, repeats).items()
  }
  found = []
  for ends, name in ways.items():
    copies = [
      max(seconds[ends, size, _MANY] - seconds[ends, size, _FEW], 0.0)
      / (_MANY - _FEW)
      for size in sizes
    ]
    alpha, beta = fit(sizes, copies)
    found.append(
      {
        'between': ' and '.join(ends),
        'link': name,
        'alpha_seconds': alpha,
        'beta_seconds_per_byte': beta,
        'copy_seconds': dict(zip(map(str, sizes), copies, strict=True)),
      }
    )
  return found


def _chain(ends, size, count):
  """Copies `size` bytes to and fro, `count` times; returns when that is done."""
  import tensorflow as tf

  with tf.device(ends[0]):
    value = tf.Variable(tf.zeros([size // 4]))

  @tf.function
  def copy():
    with tf.device(ends[0]):
      x = value.read_value()
    for place in range(1, count + 1):
      with tf.device(ends[place % 2]):
        x = tf.identity(x)
    with tf.device(ends[0]):
      return tf.reduce_sum(x[:1])

  return lambda: copy().numpy()


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
  """Alpha and beta, neither below zero, of `alpha + beta * size`.

  Errors count relative to what was measured, so that small sizes count too.

  Example:

    >>> alpha, beta = fit([10, 100, 1000], [3.0, 12.0, 102.0])
    >>> round(alpha, 6), round(beta, 6)
    (2.0, 0.1)
  """
  weights = 1 / np.maximum(seconds, 1e-9)
  beta, alpha = np.polyfit(sizes, seconds, 1, w=weights)
  return max(float(alpha), 0.0), max(float(beta), 0.0)


def choices(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """For each set of `benchmarks.all_reduce`'s results what was best, and ours."""

  def setting(row):
    return row['num_devices'], row['set']

  found = []
  for (num_devices, name), rows in itertools.groupby(results, setting):
    times = {r['peer']: r['median_ms'] for r in rows if r['kind'] == 'ours'}
    auto = times.pop(_AUTO)
    best = min(times, key=times.get)
    found.append(
      {
        'num_devices': num_devices,
        'set': name,
        'auto_ms': auto,
        'best': best,
        'auto_to_best': auto / times[best],
        'median_ms': times,
      }
    )
  return found


def line_of(copy: Mapping[str, Any]) -> str:
  """A line of `tf_strategies.cross_device.links.LINKS`."""
  return (
    f"  '{copy['link']}': collectives.Link({copy['alpha_seconds']:.1e}, "
    f'{copy["beta_seconds_per_byte"]:.2e}),'
  )


def text(found: Mapping[str, Any]) -> str:
  """The constants, ready to be put in, and a table of the choices."""
  lines = ['For LINKS in tf_strategies/cross_device/links.py:', '']
  for copy in found['copies']:
    lines += [f'  # Between {copy["between"]}.', line_of(copy)]
  algorithms = list(found['choices'][0]['median_ms'])
  rows = [
    [row[c] for c in ('num_devices', 'set', 'auto_ms', 'best', 'auto_to_best')]
    + [row['median_ms'][name] for name in algorithms]
    for row in found['choices']
  ]
  worst = max(row['auto_to_best'] for row in found['choices'])
  columns = ['devices', 'set', 'Auto ms', 'best', 'Auto to best']
  columns += [name.removesuffix('AllReduce') for name in algorithms]
  lines += [
    '',
    f'AutoAllReduce takes at most {worst:.2f} of the time of the best:',
    '',
    report.markdown(columns, rows),
  ]
  return '\n'.join(lines)
