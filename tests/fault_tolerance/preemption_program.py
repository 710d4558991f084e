"""A run that may be preempted, with `fit` or a custom loop, on any strategy.

  python -m tests.fault_tolerance.preemption_program '{"loop": "fit", ...}'

runs it in its own process, or as a worker of the launcher.
"""

import dataclasses
import json
import os
import sys
import time

import numpy as np

from tests.fault_tolerance import elastic_program

EPOCHS = 3
STEPS = elastic_program.STEPS


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the training and of its output.

  Attributes:
    loop: 'fit' or 'custom'.
    strategy: name of the strategy.
    devices: logical CPUs of this process.
    directory: directory of checkpoints, pids, steps and weights.
    step_seconds: minimum duration of a step.
    accumulation: number of gradient accumulation steps.
    steps_per_execution: argument of `compile`.
    evaluates: whether `fit` evaluates after each epoch.
  """

  loop: str
  strategy: str
  devices: int
  directory: str
  step_seconds: float = 0.0
  accumulation: int | None = None
  steps_per_execution: int = 1
  evaluates: bool = False


def build(options, strategy):
  """Returns a built model with random numbers and moving statistics."""
  import keras

  keras.backend.clear_session()
  with strategy.scope():
    model = elastic_program.build('rich')
    optimizer = keras.optimizers.Adam(
      keras.optimizers.schedules.CosineDecay(0.01, EPOCHS * STEPS),
      gradient_accumulation_steps=options.accumulation,
    )
    model.compile(
      optimizer,
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=['accuracy'],
      steps_per_execution=options.steps_per_execution,
      jit_compile=False,
    )
    model.optimizer.build(model.trainable_variables)
  return model


def train(options, strategy, after_step=lambda step: None):
  """Trains from the newest checkpoint to the end.

  Args:
    options: an `Options`.
    strategy: the strategy to train with.
    after_step: called with the number of completed steps, before the process
      checks for a signal.

  Returns:
    The state by name, and the results of each epoch that ended in this call.
  """
  import tensorflow as tf

  import tf_strategies as tfs
  from tf_strategies.checkpoint import model_state

  model = build(options, strategy)
  run = tfs.Run(os.path.join(options.directory, 'checkpoints'), model)
  start = run.restore()
  is_fit = options.loop == 'fit'
  batches = elastic_program.make_batches(
    start.epoch, 0 if is_fit else start.step, epochs=EPOCHS
  )
  # Keras uses the number of batches if it is known.
  left = EPOCHS * STEPS - start.epoch * STEPS - (0 if is_fit else start.step)
  batches = batches.apply(tf.data.experimental.assert_cardinality(left))
  loop = _fit if is_fit else _loop
  history = loop(options, model, run, start, batches, after_step)
  variables = model_state.name_variables(model, model.optimizer)
  return {k: v.value.numpy() for k, v in variables.items()}, history


def _fit(options, model, run, start, batches, after_step):
  import keras

  history = {}

  class Report(keras.callbacks.Callback):
    """Counts steps and keeps the results of epochs."""

    def on_epoch_begin(self, epoch, logs=None):
      self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
      self.done = batch + options.steps_per_execution

    def on_train_batch_end(self, batch, logs=None):
      after_step(self.epoch * STEPS + self.done)

    def on_test_batch_end(self, batch, logs=None):
      after_step((self.epoch + 1) * STEPS + 0.5)

    def on_epoch_end(self, epoch, logs=None):
      history[str(epoch)] = [logs['loss'], logs['accuracy']]

  validation = None
  if options.evaluates:
    validation = elastic_program.make_batches(0, 0, epochs=1)
  if start.epoch < EPOCHS:
    model.fit(
      batches,
      initial_epoch=start.epoch,
      epochs=EPOCHS,
      steps_per_epoch=STEPS,
      callbacks=[Report(), run],
      validation_data=validation,
      verbose=0,
    )
  return history


def _loop(options, model, run, start, batches, after_step):
  import tensorflow as tf

  strategy = model.distribute_strategy
  iterator = iter(strategy.experimental_distribute_dataset(batches))

  @strategy.step
  def train_step(batch):
    x, y = batch
    with tf.GradientTape() as tape:
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        y, model(x, training=True)
      )
      loss = tf.reduce_mean(losses)
    variables = model.trainable_variables
    gradients = tape.gradient(loss, [v.value for v in variables])
    model.optimizer.apply(gradients, variables)

  with run:
    for epoch in range(start.epoch, EPOCHS):
      first = start.step if epoch == start.epoch else 0
      for step in range(first, STEPS):
        train_step(next(iterator))
        after_step(epoch * STEPS + step + 1)
        # Always checks at the end of an epoch: the run may end there.
        run.exit_if_preempted(epoch, step + 1, at_once=step + 1 == STEPS)
      run.save(epoch + 1)
  return {}


def main(options):
  """Trains as one process. Writes its pid, steps and results to files."""
  rank = 0
  if 'TF_CONFIG' in os.environ:
    rank = json.loads(os.environ['TF_CONFIG'])['task']['index']

  def write(name, text):
    path = os.path.join(options.directory, name)
    with open(f'{path}.new', 'w', encoding='utf-8') as f:
      f.write(text)
    os.replace(f'{path}.new', path)

  import tensorflow as tf

  import tf_strategies as tfs
  from tests import virtual_devices

  virtual_devices.configure(options.devices)
  devices = [f'CPU:{i}' for i in range(options.devices)]
  tf.keras.utils.set_random_seed(1)
  strategy = tfs.create_strategy(options.strategy, devices=devices)

  def after_step(step):
    # A restarted process has a different pid.
    write(f'step_{rank}', f'{os.getpid()} {step}')
    time.sleep(options.step_seconds)

  state, history = train(options, strategy, after_step)
  if rank == 0:
    np.savez(os.path.join(options.directory, 'state.npz'), **state)
    write('history', json.dumps(history))
  if hasattr(strategy, 'close'):
    strategy.close()


if __name__ == '__main__':
  from absl import logging as absl_logging

  absl_logging.set_verbosity('info')
  main(Options(**json.loads(sys.argv[1])))
