"""The part `links` of `benchmarks.gpu`: the cost of copies.

Measures the constants of `tf_strategies.cross_device.links`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import measure

# Copies in a chain, one after the other. The difference between two chains excludes
# the fixed cost of a call.
_FEW, _MANY = 2, 12


def measure_copies(
  devices: Sequence[str], sizes: Sequence[int], rounds: int, repeats: int = 5
) -> list[dict[str, Any]]:
  """Measures alpha and beta of copies between two devices, and host and device.

  Must run before this process uses TensorFlow. Copies are made by TensorFlow in a
  graph, so that they include the cost of the runtime, as messages of a schedule do.

  Args:
    devices: names of two devices.
    sizes: sizes in bytes.
    rounds: number of turns of each size.
    repeats: number of timed calls in each turn.

  Returns:
    For each pair `alpha_seconds`, `beta_seconds_per_byte`, `copy_seconds` by size,
    and the `line` of `links.LINKS` with these constants.
  """
  # Imported late, because TensorFlow reads its environment during import.
  import tensorflow as tf

  from tf_strategies.cross_device import links

  # The optimizer would remove a copy that leads back.
  tf.config.optimizer.set_experimental_options({'disable_meta_optimizer': True})
  first, second = devices
  ways = {
    ends: links.name_of(ends) if first.startswith('GPU') else 'cpu'
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
        'line': _line(name, alpha, beta),
        'alpha_seconds': alpha,
        'beta_seconds_per_byte': beta,
        'copy_seconds': dict(zip(map(str, sizes), copies, strict=True)),
      }
    )
  return found


def _chain(ends, size, count):
  """Returns a function that copies `size` bytes back and forth `count` times."""
  import tensorflow as tf

  with tf.device(ends[0]):
    value = tf.Variable(tf.zeros([size // 4]))

  @tf.function
  def copy():
    with tf.device(ends[0]):
      x = value.read_value()
    for copy_number in range(1, count + 1):
      with tf.device(ends[copy_number % 2]):
        x = tf.identity(x)
    with tf.device(ends[0]):
      return tf.reduce_sum(x[:1])

  return lambda: copy().numpy()


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
  """Fits `alpha + beta * size`. Returns alpha and beta, both at least 0.

  Minimizes relative errors, so that small sizes count too.

  Example:

    >>> alpha, beta = fit([10, 100, 1000], [3.0, 12.0, 102.0])
    >>> round(alpha, 6), round(beta, 6)
    (2.0, 0.1)
  """
  weights = 1 / np.maximum(seconds, 1e-9)
  beta, alpha = np.polyfit(sizes, seconds, 1, w=weights)
  return max(float(alpha), 0.0), max(float(beta), 0.0)


def _line(link: str, alpha: float, beta: float) -> str:
  return f"'{link}': cost_model.Link({alpha:.1e}, {beta:.2e}),"
