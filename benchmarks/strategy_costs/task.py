"""What every task of a job of `strategies` runs: an example, with a clock.

  python -m benchmarks.strategy_costs.task '{"options": ..., ...}'

The argument is a `Spec` as JSON. Each task that trains writes its report, that
of the example and what the clock counted, to `<rank>.json`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from absl import flags

import tf_strategies as tfs
from benchmarks.strategy_costs import watch as watch_lib
from examples import common, datasets, mnist_keras_fit, reporting


@dataclasses.dataclass(frozen=True)
class Spec:
  """What to train, and what to measure.

  Attributes:
    options: values of the example's flags, by name; None for the default.
    num_virtual_devices: logical devices to train on; 0 takes the devices as
      they are.
    untimed_steps: trained and taken back before the clock starts: in them
      TensorFlow traces, and each worker builds what it will run.
    evaluate_every: steps between two test losses; 0 computes none.
    output_dir: where the reports go.
  """

  options: Mapping[str, Any]
  num_virtual_devices: int
  untimed_steps: int
  evaluate_every: int
  output_dir: str

  def flags(self) -> list[str]:
    """The command line of the example."""
    options = {**self.options, 'num_virtual_devices': self.num_virtual_devices}
    return [
      f'--{name}={str(value).lower() if isinstance(value, bool) else value}'
      for name, value in options.items()
      if value is not None
    ]


def train(spec: Spec) -> dict[str, Any]:
  """Trains as an example would; returns its report and what was measured.

  Raises:
    UnsupportedOptionError: options that cannot give a right result.
    DataError: data that are missing or damaged.
  """
  flags.FLAGS(['task', *spec.flags()])
  common.prepare_flags()
  strategy = common.create_strategy()
  data = datasets.load(flags.FLAGS.dataset, flags.FLAGS.data_path)
  model = mnist_keras_fit.build_model(strategy, data.num_classes)
  untimed = _train_untimed(strategy, data, model, spec.untimed_steps)
  evaluate = None
  if spec.evaluate_every and common.is_chief(strategy):
    evaluate = TestLoss(data, model)

  def rows_in_step(step):
    before = common.images_in_steps(data, step)
    return common.images_in_steps(data, step + 1) - before

  watch = watch_lib.Watch(
    common.steps_per_epoch(data),
    rows_in_step,
    lambda: common.join(strategy),
    evaluate,
    spec.evaluate_every,
  )
  run = reporting.Run('strategies', strategy, data)
  history = model.fit(
    mnist_keras_fit.train_batches(strategy, data),
    epochs=flags.FLAGS.epochs,
    steps_per_epoch=common.steps_per_epoch(data),
    validation_data=mnist_keras_fit.test_batches(data),
    callbacks=[watch],
    shuffle=False,
    verbose=0,
  )
  found = run.report(
    model, model.optimizer, model.metrics, *reporting.last_results(history)
  )
  steps = found['steps_this_run'] + untimed
  found |= {
    'examples_per_second': watch.examples_per_second,
    'bytes_per_step': reporting.bytes_per_step(found['all_reduce'], steps),
    'rank': getattr(strategy, 'rank', 0),
    'timed_epochs': watch.epochs,
    'curve': watch.curve,
  }
  if common.has_servers(strategy):
    strategy.close()
  return found


class TestLoss:
  """Computes the test loss in this process alone, on a copy of the weights.

  Under every strategy the same way; what `evaluate` would do to the metrics of
  the `fit` that goes on does not happen.

  Args:
    data: that the model is trained on.
    model: that is trained.
  """

  def __init__(self, data: datasets.ImageClassificationData, model):
    self._model = model
    self._copy = keras.models.clone_model(model)
    self._copy.compile(
      loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      jit_compile=False,
    )
    self._test_set = mnist_keras_fit.test_batches(data)

  def __call__(self) -> float:
    """Returns the loss of the weights as they are."""
    for copy, variable in zip(
      self._copy.weights, self._model.weights, strict=True
    ):
      copy.assign(variable.numpy())
    found = self._copy.evaluate(self._test_set, verbose=0, return_dict=True)
    return float(found['loss'])


def _train_untimed(strategy, data, model: keras.Model, steps: int) -> int:
  """Trains some steps and takes them back; returns how many."""
  steps = min(steps, common.steps_per_epoch(data))
  if not steps:
    return 0
  variables = [*model.weights, *model.optimizer.variables]
  values = [v.numpy() for v in variables]
  model.fit(
    mnist_keras_fit.train_batches(strategy, data),
    steps_per_epoch=steps,
    shuffle=False,
    verbose=0,
  )
  common.join(strategy)
  for variable, value in zip(variables, values, strict=True):
    variable.assign(value)
  return steps


def main(argv: Sequence[str]) -> int:
  """Does this task's part of the job; returns the exit status."""
  spec = Spec(**json.loads(argv[1]))
  try:
    found = tfs.cluster.run_task(lambda: train(spec))
  except tfs.errors.Error as e:
    print(f'{type(e).__name__}: {e}', file=sys.stderr)
    return 1
  path = os.path.join(spec.output_dir, f'{found["rank"]}.json')
  reporting.write_json(found, path)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
