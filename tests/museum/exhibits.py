"""Reports that people filed of TensorFlow's strategies, each as a small program.

An exhibit follows the symptom and the structure of its report, on CPUs and with
little data. Nothing here imports `tf_strategies`, which changes Keras:
TensorFlow's strategies run without it.

`museum_test.py` holds our strategies to one device's numbers; `run.py` also runs
TensorFlow's and writes `docs/museum.md`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.museum import programs
from tests.programs import common


@dataclasses.dataclass(frozen=True)
class Exhibit:
  """One report.

  Attributes:
    report: the repository's name and the number: 'keras#20585'.
    symptom: what was reported, as a sentence.
    program: runs in a scope, and returns numbers.
    place: where it runs: 'devices' of one process, two 'workers', 'servers' (one,
      with two workers), or 'half': one worker of a cluster of two.
    replicas: how many devices, for 'devices'.
    limits: relative and absolute, within which numbers are equal.
    most: each number may be this at most, instead of one device's number.
    error: the error that is right, instead of numbers.
  """

  report: str
  symptom: str
  program: Callable[[], Any]
  place: str = 'devices'
  replicas: int = 2
  limits: tuple[float, float] = (1e-5, 1e-6)
  most: float | None = None
  error: str = ''


def run(exhibit: Exhibit, strategy: tf.distribute.Strategy | None = None):
  """Returns what an exhibit's program gives: the same seed, names and policy."""
  return common.run(exhibit.program, strategy)


def fault(exhibit: Exhibit, want: Any, found: Any) -> str:
  """What is wrong with the numbers of an exhibit; nothing if they are right.

  Args:
    exhibit: of which.
    want: one device's numbers.
    found: a strategy's.
  """
  found = [np.asarray(x, np.float64) for x in tf.nest.flatten(found)]
  if exhibit.most is not None:
    worst = max(float(x.max()) for x in found)
    return '' if worst <= exhibit.most else f'{worst:.3g} > {exhibit.most:g}'
  want = [np.asarray(x, np.float64) for x in tf.nest.flatten(want)]
  if [x.shape for x in want] != [x.shape for x in found]:
    return 'other shapes'
  for a, b in zip(want, found, strict=True):
    if np.isfinite(a).all() and not np.isfinite(b).all():
      return 'NaN or infinity'
  relative, absolute = exhibit.limits
  pairs = list(zip(want, found, strict=True))
  if all(np.allclose(b, a, relative, absolute) for a, b in pairs):
    return ''
  worst = max(float(np.abs(a - b).max()) for a, b in pairs if a.size)
  return f'differs by {worst:.2g}'


_SIXTEEN_BITS = (2e-3, 2e-3)

EXHIBITS = (
  Exhibit(
    'keras#18110',
    '`fit` of an Embedding with `jit_compile=True` fails: XLA has no '
    'collective that gathers.',
    programs.compiled_embedding,
  ),
  Exhibit(
    'keras#18624',
    '`iterations` and the learning rate have no aggregation, so that '
    'parameter servers with several GPUs a worker fail. (Here in `fit`, '
    'with one CPU a worker.)',
    programs.fit_on_servers,
    'servers',
  ),
  Exhibit(
    'keras#18666',
    '`LossScaleOptimizer` raises: `merge_call` inside a condition.',
    programs.scaled_loss,
  ),
  Exhibit(
    'keras#19891',
    'The number of replicas changes what `evaluate` and `fit` give.',
    programs.evaluated_by_hand,
    replicas=4,
  ),
  Exhibit(
    'keras#20582',
    '`gradient_accumulation_steps` raises: `merge_call` inside a condition.',
    programs.accumulated,
  ),
  Exhibit(
    'keras#20585',
    'The tutorial of `MultiWorkerMirroredStrategy` raises in `fit` since '
    'Keras 3.',
    programs.tutorial,
    'workers',
  ),
  Exhibit(
    'keras#20601',
    'Metrics that are aggregated by `SUM` grow at each step until the loss is '
    'NaN.',
    programs.many_steps,
  ),
  Exhibit(
    'keras#20612',
    'A model with Dropout cannot be made: a variable of integers with the '
    'aggregation `MEAN`. (A fix, for the report keras#20611.)',
    programs.dropout,
  ),
  Exhibit(
    'keras#20763',
    'XLA and mixed precision together raise on several devices: `merge_call` '
    'inside a condition.',
    programs.compiled_mixed_images,
    limits=_SIXTEEN_BITS,
  ),
  Exhibit(
    'keras#21061',
    'Training on several devices always gives NaN, even of a model without '
    'weights.',
    programs.identity,
  ),
  Exhibit(
    'keras#21069',
    'A Transformer for texts raises in `fit`: the gradients of its Embeddings '
    'have unknown shapes.',
    programs.transformer,
  ),
  Exhibit(
    'keras#21366',
    '`LossScaleOptimizer` with `jit_compile=True` and `mixed_float16` raises.',
    programs.compiled_mixed,
    limits=_SIXTEEN_BITS,
  ),
  Exhibit(
    'tensorflow#42616',
    'The memory of workers grows with each epoch. (Here: by more than 16 KiB.)',
    programs.growth,
    'workers',
    most=16.0,
  ),
  Exhibit(
    'tensorflow#62915',
    'Loss and accuracy are NaN on four GPUs of a certain kind. (Here on CPUs.)',
    programs.two_layers,
    replicas=4,
  ),
  Exhibit(
    'tensorflow#90686',
    'The loss becomes infinite, then NaN, on several GPUs since TensorFlow '
    '2.16. (Here on CPUs.)',
    programs.sequences,
  ),
  Exhibit(
    'tensorflow#98217',
    'A worker whose partner was never started waits for minutes, and then the '
    'process dies.',
    programs.is_made,
    'half',
    error='RendezvousError',
  ),
  Exhibit(
    'ray#47464',
    "The trainer's example raises: a `PerReplica` cannot be converted to a "
    'tensor. (Here without Ray, which only sets `TF_CONFIG`.)',
    programs.regression_of_a_trainer,
    'workers',
  ),
)

# Named in the page, and in no way run.
NOT_FOUND = ('horovod#2844', 'tensorflow#73836')
