"""One training run, on one device or under a strategy, and how to compare.

The promise under test: same data, same seed, same global batch, same result as
one device. A `Feature` is a Keras program; `train` runs it; `ConformanceTest`
compares everything that came out.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import tiers, virtual_devices

virtual_devices.configure()

GLOBAL_BATCH_SIZE = 32
NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class StrategyCase:
  """A row of the table: a strategy that must equal one device."""

  name: str
  create: Callable[[], tf.distribute.Strategy]


# Later strategies join the whole table by one line here.
STRATEGIES = (
  StrategyCase(
    'ring_mirrored',
    lambda: tfs.create_strategy(
      'ring_mirrored', devices=virtual_devices.names(4)
    ),
  ),
  StrategyCase(
    'central_storage',
    # Not CPU:0, where TensorFlow puts what nobody placed.
    lambda: tfs.CentralStorageStrategy(
      virtual_devices.names(4), virtual_devices.name(1)
    ),
  ),
)

# Not in the whole table: `make soak` trains it.
CENTRAL_STORAGE_OF_2 = StrategyCase(
  'central_storage_of_2',
  lambda: tfs.create_strategy(
    'central_storage', devices=virtual_devices.names(2)
  ),
)


def images(rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Random images and labels: no two rows, so no two replicas, are alike."""
  rng = np.random.default_rng(7)
  x = rng.normal(size=(rows, 8, 8, 1)).astype(np.float32)
  return x, rng.integers(0, NUM_CLASSES, rows)


def conv_model(*extra_layers, **conv_options) -> keras.Model:
  """A convolution, max-pooling (whose gradient hates zero rows), two dense."""
  layers = keras.layers
  return keras.Sequential(
    [
      layers.Input([8, 8, 1]),
      layers.Conv2D(4, 3, activation='relu', **conv_options),
      layers.MaxPooling2D(),
      *extra_layers,
      layers.Flatten(),
      layers.Dense(NUM_CLASSES, dtype='float32'),
    ]
  )


def momentum() -> keras.optimizers.Optimizer:
  """An optimizer with a slot, so that its state counts too."""
  return keras.optimizers.SGD(0.05, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Feature:
  """A column of the table: one Keras program.

  Attributes:
    name: of the test.
    rows: examples; 96 are three full batches.
    optimizer: makes the inner optimizer.
    model: makes the model.
    data: makes x and y of so many rows.
    compile: further arguments of `compile`.
    fit: further arguments of `fit`.
    policy: Keras dtype policy.
    tolerance: of the weights; the promise is 1e-6 in float32, 2e-3 in 16-bit.
    mark: of `tiers`, for the first strategy of the table.
    mark_of_others: for the other strategies.
  """

  name: str
  rows: int = 96
  optimizer: Callable[[], keras.optimizers.Optimizer] = momentum
  model: Callable[[], keras.Model] = conv_model
  data: Callable[[int], tuple] = images
  compile: dict[str, Any] = dataclasses.field(default_factory=dict)
  fit: dict[str, Any] = dataclasses.field(default_factory=dict)
  policy: str = 'float32'
  tolerance: float = 1e-6
  mark: Callable[..., Any] = tiers.unmarked
  mark_of_others: Callable[..., Any] = tiers.soak


@dataclasses.dataclass
class Result:
  """Everything that a training run produces."""

  model: keras.Model
  weights: list[np.ndarray]
  optimizer_state: dict[str, np.ndarray]
  history: dict[str, list[float]]
  evaluation: dict[str, float]
  predictions: np.ndarray


def scope_of(strategy):
  """The strategy's scope, or none for one device."""
  return strategy.scope() if strategy else contextlib.nullcontext()


@contextlib.contextmanager
def dtype_policy(name: str):
  """Keras's global dtype policy, for a while."""
  before = keras.config.dtype_policy()
  keras.config.set_dtype_policy(name)
  try:
    yield
  finally:
    keras.config.set_dtype_policy(before)


def build(feature: Feature, strategy=None) -> keras.Model:
  """The compiled model of a feature, in the strategy's scope."""
  keras.backend.clear_session()  # Both runs give variables the same names.
  keras.utils.set_random_seed(11)
  with scope_of(strategy), dtype_policy(feature.policy):
    model = feature.model()
    optimizer = feature.optimizer()
    options = {
      'loss': keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      'metrics': ['accuracy'],
      **feature.compile,
    }
    model.compile(optimizer, **options)
  return model


def train(feature: Feature, strategy=None, epochs: int = 2) -> Result:
  """Runs `fit`, `evaluate` and `predict` of a feature."""
  model = build(feature, strategy)
  x, y = feature.data(feature.rows)
  options = {
    'batch_size': GLOBAL_BATCH_SIZE,
    'epochs': epochs,
    'shuffle': False,
    'verbose': 0,
    **feature.fit,
  }
  history = model.fit(x, y, **options)
  evaluation = model.evaluate(
    x, y, batch_size=GLOBAL_BATCH_SIZE, verbose=0, return_dict=True
  )
  predictions = model.predict(x, batch_size=GLOBAL_BATCH_SIZE, verbose=0)
  return Result(
    model,
    [np.asarray(w, np.float64) for w in model.get_weights()],
    optimizer_state(model),
    history.history,
    evaluation,
    predictions,
  )


def optimizer_state(model: keras.Model) -> dict[str, np.ndarray]:
  """The optimizer's variables by name."""
  return {
    v.path.split('/')[-1]: np.asarray(v.numpy(), np.float64)
    for v in model.optimizer.variables
  }


class ConformanceTest(tf.test.TestCase):
  """Compares a run under a strategy with the same run on one device."""

  def assert_feature(self, case: StrategyCase, feature: Feature) -> Result:
    """Trains both, compares them, and proves that our op did the work."""
    expected = train(feature)
    strategy = case.create()
    actual = train(feature, strategy)
    self.assert_results(expected, actual, feature.tolerance)
    self.assert_replicas_equal(actual.model)
    if not actual.model.run_eagerly:  # Each replica then has the whole batch.
      self.assert_our_op_ran(strategy, actual.model)
    calls = strategy.communication_report()['calls']
    self.assertEqual(calls['all_reduce_in_control_flow'], 0)
    return actual

  def assert_results(self, expected, actual, tolerance):
    """Weights, optimizer state, history, metrics and predictions."""
    self.assertLen(actual.weights, len(expected.weights))
    moved = 0.0
    for i, (want, got) in enumerate(
      zip(expected.weights, actual.weights, strict=True)
    ):
      self.assertLessEqual(
        np.abs(want - got).max(), tolerance, f'weight {i}, {want.shape}'
      )
      moved = max(moved, np.abs(want).max())
    self.assertGreater(moved, 0.01)
    self.assertEqual(set(expected.optimizer_state), set(actual.optimizer_state))
    # Moments are as far from 1 as gradients are: compare by magnitude.
    for name, want in expected.optimizer_state.items():
      scale = max(1.0, np.abs(want).max())
      self.assertLessEqual(
        np.abs(want - actual.optimizer_state[name]).max(),
        2 * tolerance * scale,
        name,
      )
    self.assertEqual(set(expected.history), set(actual.history))
    for key, want in expected.history.items():
      self.assertAllClose(want, actual.history[key], 2 * tolerance, tolerance)
    self.assertAllClose(
      expected.evaluation, actual.evaluation, 2 * tolerance, tolerance
    )
    self.assertAllClose(
      expected.predictions, actual.predictions, 10 * tolerance, 10 * tolerance
    )

  def assert_replicas_equal(self, model, min_copies=2):
    """Every replica's copy of every mirrored variable is the same, bitwise."""
    strategy = model.variables[0].value.distribute_strategy
    if isinstance(strategy, tfs.CentralStorageStrategy):
      self.assert_one_copy(model, strategy)
      return
    mirrored = 0
    for variable in (*model.variables, *model.optimizer.variables):
      copies = getattr(variable.value, 'values', ())
      is_partial = (
        getattr(variable.value, 'synchronization', None)
        == tf.VariableSynchronization.ON_READ
      )
      if len(copies) < min_copies or is_partial:
        continue
      mirrored += 1
      for copy in copies[1:]:
        np.testing.assert_array_equal(
          copies[0].numpy(), copy.numpy(), variable.path
        )
    self.assertGreater(mirrored, 0)

  def assert_one_copy(self, model, strategy):
    """Every variable but seeds and metrics is on the parameter device, once."""
    central = 0
    for variable in (*model.variables, *model.optimizer.variables):
      value = variable.value
      if (
        'seed_generator_state' in variable.path
        or value.synchronization == tf.VariableSynchronization.ON_READ
      ):
        self.assertLen(value.values, strategy.num_replicas_in_sync)
        continue
      central += 1
      self.assertLen(value.values, 1, variable.path)
      self.assertEqual(value.values[0].device, strategy.parameter_device)
    self.assertGreater(central, 1)

  def num_reductions(self, strategy):
    """How often the strategy's own op has brought gradients together."""
    calls = strategy.communication_report()['calls']
    if isinstance(strategy, tfs.CentralStorageStrategy):
      return calls['all_reduce'] + calls['reduce']
    return calls['all_reduce']

  def assert_our_op_ran(self, strategy, model):
    """The strategy's own op all-reduced once a step, and nothing beside it."""
    steps = int(model.optimizer.iterations.numpy())
    self.assertGreater(steps, 0)
    self.assertGreaterEqual(self.num_reductions(strategy), steps)


def every(mark_of_others=tiers.unmarked) -> list[Any]:
  """Named parameters: every strategy.

  Args:
    mark_of_others: of `tiers`, for every strategy but the first.
  """
  marks = [tiers.unmarked, *[mark_of_others] * (len(STRATEGIES) - 1)]
  return [
    mark(case.name, case) for mark, case in zip(marks, STRATEGIES, strict=True)
  ]


def table(features, strategies=STRATEGIES) -> list[Any]:
  """Named parameters: every strategy with every feature, marked as it says."""
  return [
    (feature.mark if case is STRATEGIES[0] else feature.mark_of_others)(
      f'{case.name}_{feature.name}', case, feature
    )
    for case in strategies
    for feature in features
  ]
