"""The conformance table under a parameter server strategy.

One chief process trains many features one after the other, each under a new
strategy on the same servers, and sends home what came out of it; the test
compares that with one device.
"""

import dataclasses
import functools
import re
import traceback
from typing import Any

import keras
import numpy as np

import tf_strategies as tfs
from tests.conformance import harness, multi_worker
from tests.conformance import parameter_server_programs as programs_lib
from tests.conformance.harness import Feature

layers = keras.layers

_SERVER = re.compile(r'^/job:ps/replica:0/task:(\d+)/')


@dataclasses.dataclass
class ServerResult:
  """What the chief has to say of one feature; `error` if it failed.

  Attributes:
    steps: optimizer steps by the optimizer's own count.
    servers: of every variable of the model and its optimizer, by path.
    report: of the strategy.
  """

  weights: list[np.ndarray] = dataclasses.field(default_factory=list)
  optimizer_state: dict[str, np.ndarray] = dataclasses.field(
    default_factory=dict
  )
  history: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
  predictions: Any = None
  steps: int = 0
  servers: dict[str, int] = dataclasses.field(default_factory=dict)
  report: dict[str, Any] = dataclasses.field(default_factory=dict)
  error: str = ''


def _bn_model():
  return harness.conv_model(layers.BatchNormalization(momentum=0.8))


def _dropout_model():
  return harness.conv_model(layers.Dropout(0.3, seed=5))


def _sequences(rows):
  rng = np.random.default_rng(5)
  x = rng.normal(size=(rows, 6, 3)).astype(np.float32)
  return x, rng.integers(0, harness.NUM_CLASSES, rows)


def _lstm_model():
  return keras.Sequential(
    [
      layers.Input([6, 3]),
      layers.LSTM(5),
      layers.Dense(harness.NUM_CLASSES),
    ]
  )


# What the table of the other strategies does not have.
FEATURES = (
  Feature('batch_normalization', rows=69, model=_bn_model),
  Feature('dropout_with_seed', rows=69, model=_dropout_model),
  Feature('lstm', rows=69, model=_lstm_model, data=_sequences),
  Feature(
    'batch_normalization_steps_per_execution',
    rows=133,
    model=_bn_model,
    compile={'steps_per_execution': 4},
  ),
  Feature(
    'adam_clipnorm',
    rows=69,
    optimizer=lambda: keras.optimizers.Adam(1e-2, clipnorm=0.05),
  ),
  Feature('steps_per_epoch', rows=96, fit={'steps_per_epoch': 2}),
)


def features() -> dict[str, Feature]:
  """Every feature of the table by name."""
  return {**multi_worker.features(), **{f.name: f for f in FEATURES}}


@functools.cache
def expected(name: str) -> harness.Result:
  """What one device makes of a feature."""
  return harness.train(features()[name])


def train_all(names, options=None) -> dict[str, ServerResult]:
  """In the chief: what came out of each feature."""
  table = features()
  return {name: _train(table[name], dict(options or {})) for name in names}


def _train(feature, options):
  strategy = tfs.create_strategy('parameter_server', **options)
  try:
    result = harness.train(feature, strategy)
    model = result.model
    return ServerResult(
      result.weights,
      result.optimizer_state,
      result.history,
      result.evaluation,
      result.predictions,
      int(model.optimizer.iterations.numpy()),
      servers_of((*model.variables, *model.optimizer.variables)),
      strategy.report(),
    )
  except Exception:
    return ServerResult(report=strategy.report(), error=traceback.format_exc())
  finally:
    strategy.close()


def run_programs(names, options=None) -> dict[str, Any]:
  """In the chief: what came out of each program, or the text of its error."""
  found = {}
  for name in names:
    strategy = tfs.create_strategy('parameter_server', **dict(options or {}))
    try:
      found[name] = programs_lib.PROGRAMS[name](strategy)
      found[name]['report'] = strategy.report()
    except Exception:
      found[name] = traceback.format_exc()
    finally:
      strategy.close()
  return found


def servers_of(variables) -> dict[str, int]:
  """Index of the parameter server that holds each variable; -1 if none does."""
  found = {}
  for variable in variables:
    match = _SERVER.match(variable.value.device)
    found[variable.path] = int(match[1]) if match else -1
  return found


class ServerConformanceTest(harness.ConformanceTest):
  """Compares what a chief sent home."""

  def assert_features(self, job, names, options=None):
    """Trains features in a chief and compares each with one device."""
    results = job.run(train_all, (tuple(names), dict(options or {})))
    self.assertEqual(set(results), set(names))
    for name in names:
      with self.subTest(name):
        self.assert_feature_result(name, results[name])

  def assert_feature_result(self, name: str, result: ServerResult):
    """The result is one device's, and workers and servers made it."""
    if result.error:
      raise AssertionError(result.error)
    feature = features()[name]
    self.assert_results(expected(name), result, feature.tolerance)
    self.assertGreater(result.steps, 0)
    self.assertGreaterEqual(result.report['steps'], result.steps)
    self.assertContainsSubset(result.servers.values(), range(2))
    self.assertGreater(sum(result.report['bytes_per_server']), 0)

  def assert_programs(self, job, names, options=None):
    """Runs programs in a chief and compares each with one device."""
    results = job.run(run_programs, (tuple(names), dict(options or {})))
    self.assertEqual(set(results), set(names))
    for name in names:
      with self.subTest(name):
        self.assert_program(results[name], programs_lib.PROGRAMS[name](None))

  def assert_program(self, result, expected):
    if isinstance(result, str):
      raise AssertionError(result)
    report = result.pop('report')
    self.assertEqual(set(result), set(expected))
    for key, want in expected.items():
      self.assertAllClose(want, result[key], 2e-6, 1e-6, key)
    self.assertGreater(report['steps'], 0)
