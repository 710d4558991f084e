"""Public bug reports of TensorFlow's strategies, each as a small program.

An exhibit reproduces the structure of its report on CPUs, with little data.
This module does not import `tf_strategies`, because that changes Keras, and
TensorFlow's strategies must run on the original.

`museum_test.py` compares our strategies with one device. `run.py` also runs
TensorFlow's strategies and writes `docs/museum.md`.
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
    report: repository and number, such as 'keras#20585'.
    symptom: the reported symptom, as a sentence.
    program: function that runs in a scope and returns numbers.
    setup: where it runs: on 'devices' of one process, on two 'workers', on 'servers'
      (one server and two workers), or with a 'missing_worker' (one of two workers).
    replicas: number of devices, for 'devices'.
    limits: relative and absolute tolerance of the comparison.
    most: upper limit of each number, used instead of one device's results.
    error: name of the expected error, if an error is correct.
  """

  report: str
  symptom: str
  program: Callable[[], Any]
  setup: str = 'devices'
  replicas: int = 2
  limits: tuple[float, float] = (1e-5, 1e-6)
  most: float | None = None
  error: str = ''


def run(exhibit: Exhibit, strategy: tf.distribute.Strategy | None = None):
  """Returns the results of an exhibit's program, with a fixed seed and policy."""
  return common.run(exhibit.program, strategy)


def fault(exhibit: Exhibit, want: Any, found: Any) -> str:
  """Describes the fault in an exhibit's numbers. Returns '' if they are right.

  Args:
    exhibit: the exhibit that ran.
    want: one device's numbers.
    found: the strategy's numbers.
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
    'parameter servers with several GPUs per worker fail. (Here in `fit`, '
    'with one CPU per worker.)',
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
    'The number of replicas changes the results of `evaluate` and `fit`.',
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
    'A model with Dropout cannot be created: an integer variable has the '
    'aggregation `MEAN`. (A pull request that fixes keras#20611.)',
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
    'missing_worker',
    error='RendezvousError',
  ),
  Exhibit(
    'ray#47464',
    "The example of Ray's trainer raises: a `PerReplica` cannot be converted "
    'to a tensor. (Here without Ray, which only sets `TF_CONFIG`.)',
    programs.regression_of_a_trainer,
    'workers',
  ),
)

# The page names these reports, but no exhibit runs them.
NOT_FOUND = ('horovod#2844', 'tensorflow#73836')
