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

import tf_strategies as tfs
from benchmarks.strategy_costs import watch as watch_lib
from examples import (
  common_flags,
  mnist_common,
  mnist_keras_fit,
  mnist_model,
  parameter_server_flags,
  training_report,
)

_EVALUATION_BATCH_SIZE = 512


@dataclasses.dataclass(frozen=True)
class Spec:
  """What to train, and what to measure.

  Attributes:
    options: fields of the example's options.
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


def train(spec: Spec) -> dict[str, Any]:
  """Trains as an example would; returns its report and what was measured.

  Raises:
    UnsupportedOptionError: options that cannot give a right result.
    DataError: data that are missing or damaged.
  """
  setup = _set_up(spec)
  model = mnist_keras_fit.build_compiled(setup)
  untimed = _train_untimed(setup, model, spec.untimed_steps)
  evaluate = None
  if spec.evaluate_every and setup.is_chief:
    evaluate = TestLoss(setup, model)
  watch = watch_lib.Watch(setup, evaluate, spec.evaluate_every)
  outcome = mnist_keras_fit.run_fit(
    setup,
    model,
    None,
    0,
    lambda callbacks, **arguments: model.fit(
      setup.data.train(setup.strategy, 0, setup.options.epochs),
      epochs=setup.options.epochs,
      steps_per_epoch=setup.data.steps_per_epoch,
      callbacks=[*callbacks, watch],
      **arguments,
    ),
  )
  outcome = dataclasses.replace(
    outcome, throughput=watch, untimed_steps=untimed
  )
  found = training_report.build('strategies', setup, model, outcome)
  found |= {
    'rank': getattr(setup.strategy, 'rank', 0),
    'iterations': int(model.optimizer.iterations.numpy()),
    'timed_epochs': watch.epochs,
    'curve': watch.curve,
  }
  if isinstance(setup.strategy, tfs.ParameterServerStrategy):
    found['parameter_server'] = setup.strategy.report()
    setup.strategy.close()
  return found


class TestLoss:
  """Computes the test loss in this process alone, on a copy of the weights.

  Under every strategy the same way; what `evaluate` would do to the metrics of
  the `fit` that goes on does not happen.

  Args:
    setup: of the run.
    model: that is trained.
  """

  def __init__(self, setup: mnist_common.Setup, model: keras.Model):
    source, options = setup.data.source, setup.options
    self._model = model
    self._copy = mnist_model.build_model(
      options.model, source.num_classes, options.dropout
    )
    self._copy.compile(
      loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      jit_compile=False,
    )
    self._test_set = tfs.data.make_dataset(
      source.test,
      tfs.data.PipelineOptions(_EVALUATION_BATCH_SIZE),
      training=False,
    )

  def __call__(self) -> float:
    """Returns the loss of the weights as they are."""
    for copy, variable in zip(
      self._copy.weights, self._model.weights, strict=True
    ):
      copy.assign(variable.numpy())
    found = self._copy.evaluate(self._test_set, verbose=0, return_dict=True)
    return float(found['loss'])


def _set_up(spec: Spec) -> mnist_common.Setup:
  if spec.options['strategy'] != 'parameter_server':
    options = common_flags.TrainingOptions(**spec.options)
    devices = mnist_common.split_device(spec.num_virtual_devices)
    return mnist_common.set_up(options, devices)
  options = parameter_server_flags.ParameterServerOptions(**spec.options)
  strategy = tfs.create_strategy(
    'parameter_server', **options.strategy_options()
  )
  return mnist_common.set_up(options, None, strategy)


def _train_untimed(
  setup: mnist_common.Setup, model: keras.Model, steps: int
) -> int:
  """Trains some steps and takes them back; returns how many."""
  steps = min(steps, setup.data.steps_per_epoch)
  if not steps:
    return 0
  variables = [*model.weights, *model.optimizer.variables]
  values = [v.numpy() for v in variables]
  model.fit(
    setup.data.train(setup.strategy, 0, 1),
    steps_per_epoch=steps,
    shuffle=False,
    verbose=0,
  )
  setup.join()
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
  training_report.write_json(found, path)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
