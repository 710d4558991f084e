"""Trains on MNIST with parameter servers: by Keras' `fit` or by a custom loop.

Two workers, two parameter servers and a chief, and the digits that scikit-learn
carries, offline:

  python -m tf_strategies.launch --num_workers=2 --num_ps=2 --chief -- \\
    python -m examples.mnist_parameter_server --dataset=digits

By a loop of one's own, on data that the workers read themselves, with no worker
more than two steps ahead of the slowest:

  python -m tf_strategies.launch --num_workers=2 --num_ps=2 --chief -- \\
    python -m examples.mnist_parameter_server --dataset=digits \\
    --loop=custom --worker_input --mode=bounded --max_staleness=2

All tasks run this program. The chief trains; workers and parameter servers do
what it sends them; an evaluator (`--evaluator` of the launcher) evaluates the
checkpoints in --checkpoint_dir. Without TF_CONFIG it trains on one device, where
--mode and the options of modes mean nothing:

  python -m examples.mnist_parameter_server --dataset=digits
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

import tf_strategies as tfs
from examples import (
  checkpointing,
  command_line,
  mnist_common,
  mnist_custom_loop,
  mnist_keras_fit,
  mnist_model,
  parameter_server_flags,
  training_report,
)
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import evaluator


def run(
  options: parameter_server_flags.ParameterServerOptions,
  devices: Sequence[str] | None = None,
) -> dict[str, object] | None:
  """Does this task's part of the job.

  Args:
    options: what to train and how.
    devices: for the signature of an example; not used.

  Returns:
    The report of the run on the chief, or where there is no cluster; None on
    the evaluator. Does not return on workers and parameter servers.

  Raises:
    ClusterConfigError: TF_CONFIG is malformed.
    RendezvousError: a worker or a parameter server is missing.
    UnsupportedOptionError: options that cannot give a right result.
    DataError: data that are missing or damaged.
  """
  del devices
  return tfs.cluster.run_task(
    train=lambda: train(options),
    evaluate=(lambda: evaluate(options)) if options.checkpoint_dir else None,
  )


def train(
  options: parameter_server_flags.ParameterServerOptions,
) -> dict[str, object]:
  """Trains as `options` say, on the chief; returns the report."""
  strategy = tfs.create_strategy(
    'parameter_server', **options.strategy_options()
  )
  _tell_evaluator(options.checkpoint_dir, is_finished=False)
  try:
    setup = mnist_common.set_up(options, None, strategy)
    data = setup.data.in_groups_of(options.steps_per_execution)
    setup = dataclasses.replace(setup, data=data)
    loop = _fit if options.loop == 'fit' else _loop
    model, optimizer, outcome = loop(setup)
    if options.save_weights:
      variables = checkpointing.state_variables(model, optimizer)
      training_report.write_weights(variables, options.save_weights, strategy)
    _tell_evaluator(options.checkpoint_dir, is_finished=True)
    return {
      **training_report.build('mnist_parameter_server', setup, model, outcome),
      'loop': options.loop,
      'iterations': int(optimizer.iterations.numpy()),
      'parameter_server': _describe(strategy),
    }
  finally:
    if _has_servers(strategy):
      strategy.close()


def evaluate(options: parameter_server_flags.ParameterServerOptions) -> None:
  """Evaluates each checkpoint of `checkpoint_dir` on one device."""
  strategy = tfs.create_strategy('one_device')
  can_log = training_report.can_log(options.log_dir)
  setup = mnist_common.set_up(options, None, strategy)
  tfs.SidecarEvaluator(
    mnist_keras_fit.build_compiled(setup),
    setup.data.test(strategy),
    options.checkpoint_dir,
    log_dir=options.log_dir if can_log else None,
    steps=setup.data.test_steps,
  ).run()


def _tell_evaluator(directory: str | None, is_finished: bool) -> None:
  """Says whether there will be more checkpoints."""
  if directory is None:
    return
  path = os.path.join(directory, evaluator.FINISHED_FILE)
  if is_finished:
    tf.io.gfile.makedirs(directory)
    with tf.io.gfile.GFile(path, 'w') as f:
      f.write('Training is over.\n')
  elif tf.io.gfile.exists(path):
    tf.io.gfile.remove(path)


def _fit(setup):
  """Trains by `fit`, which sees nothing of the cluster."""
  model = mnist_keras_fit.build_compiled(
    setup, setup.options.steps_per_execution
  )
  checkpoint, start = None, Position()
  if not _has_servers(setup.strategy):  # Else `fit` makes the strategy save.
    checkpoint, start = checkpointing.open_run(setup, model, model.optimizer)
  outcome = mnist_keras_fit.fit_batches(
    setup, model, checkpoint, start, _batches(setup, start.epoch)
  )
  return model, model.optimizer, outcome


def _loop(setup):
  """Trains by a loop of our own, whose steps run on workers."""
  options = setup.options
  with setup.strategy.scope():
    model = mnist_model.build_model(
      options.model, setup.data.source.num_classes, options.dropout
    )
    optimizer = mnist_model.build_optimizer(options, setup.num_replicas)
    # Variables may not be made while the step is traced.
    optimizer.build(model.trainable_variables)
    metrics = mnist_custom_loop.Metrics()
  checkpoint = None
  if _has_servers(setup.strategy):
    # From here on the strategy saves by itself, within epochs too.
    steps = setup.strategy.restore(model=model, optimizer=optimizer)
    start = Position(*divmod(steps, setup.data.steps_per_epoch))
  else:
    checkpoint, start = checkpointing.open_run(
      setup, model, optimizer, metrics.all
    )
  outcome = mnist_custom_loop.run_epochs(
    setup,
    _Loop(setup, model, optimizer, metrics),
    checkpoint,
    start,
    _batches(setup, *start),
  )
  return model, optimizer, outcome


class _Loop:
  """One epoch of training, one evaluation.

  A call of a step returns before the step is done, and waits only while all
  workers have enough to do. Reading a variable, such as a metric's, waits for
  all steps.
  """

  def __init__(self, setup, model, optimizer, metrics):
    self.throughput = training_report.Throughput()
    self.variables = [
      *model.variables,
      *optimizer.variables,
      *metrics.variables,
    ]
    self._setup = setup
    self._metrics = metrics
    self._train_step = _make_step(
      setup.strategy,
      # A worker computes with the whole of its batch: it is one replica.
      mnist_custom_loop.make_replica_step(
        model, optimizer, metrics, replicas=1
      ),
      [optimizer],
    )
    self._test_step = _make_step(
      setup.strategy, mnist_custom_loop.make_replica_test_step(model, metrics)
    )
    self._test_set = setup.data.test(setup.strategy)

  def train_epoch(
    self, epoch, first_step, batches, after_step
  ) -> dict[str, float]:
    options, data = self._setup.options, self._setup.data
    if not first_step or _has_servers(self._setup.strategy):
      self._metrics.reset()
    self.throughput.start_epoch()
    for step in range(first_step, data.steps_per_epoch):
      with self._setup.measured_step():
        loss = self._train_step(next(batches))
      if step + 1 == data.steps_per_epoch:
        self._setup.join()
      self.throughput.end_step(data.rows_in_step(step, epoch))
      if options.verbose and (step + 1) % options.log_every_steps == 0:
        # Of the newest step that is done: nothing is waited for.
        mnist_custom_loop.print_step(
          epoch, step, data, float(loss), self.throughput
        )
      after_step(epoch, step + 1)
    self.throughput.end_epoch()
    return self._metrics.results()

  def evaluate(self) -> dict[str, float]:
    self._metrics.reset()
    for batch in self._test_set:
      self._test_step(batch)
      self._setup.still_alive()
    return self._metrics.results()


def _make_step(
  strategy: tf.distribute.Strategy,
  fn: Callable,
  optimizers: Sequence[keras.optimizers.Optimizer] = (),
) -> Callable:
  """Returns what runs `fn(batch)` on a worker, or on this device."""
  if _has_servers(strategy):
    return strategy.remote_step(fn, optimizers)

  @tf.function
  def step(batch):
    return strategy.run(fn, args=(batch,))

  return step


def _batches(setup, first_epoch, first_step=0):
  """The training data from there on, as the chief or the workers read them."""
  data, options = setup.data, setup.options
  read = data.train_on_workers if options.worker_input else data.train
  return read(setup.strategy, first_epoch, options.epochs, first_step)


def _has_servers(strategy) -> bool:
  """Whether the strategy has a cluster, or is the one of a single device."""
  return isinstance(strategy, tfs.ParameterServerStrategy)


def _describe(strategy) -> dict[str, object] | None:
  """What the strategy counted, and the size of its cluster."""
  if not _has_servers(strategy):
    return None
  jobs = strategy.cluster.jobs
  return {
    'workers': len(jobs['worker']),
    'servers': len(jobs['ps']),
    **strategy.report(),
  }


if __name__ == '__main__':
  command_line.run(
    run, parameter_server_flags.define, parameter_server_flags.parse
  )
