"""Programs of steps that read and write variables on servers."""

import functools
import math

import numpy as np
import tensorflow as tf

from tf_strategies.strategies.parameter_server import (
  batch_message,
  engine,
  slots,
  traced_step,
)


def sum_after_overwrite(a, b, x):
  a.assign(x)
  a.assign_add(x)
  b.assign_add(x)
  b.assign(tf.zeros_like(b))
  b.assign_add(x)
  return a * b


def sums_of_infinities(a, b, x):
  # The difference of new and old value would be NaN.
  a.assign_add(x * math.inf)
  tf.cond(
    x[1] > 0.0, lambda: b.assign_add(x * math.inf), lambda: b.read_value()
  )
  return a + b


@tf.function
def _triple(variable):
  variable.assign(variable * 3.0)


def sum_of_a_value_that_a_function_overwrites(a, b, x):
  _triple(a)
  old = a.read_value()
  _triple(a)
  a.assign(old + x)
  return a.read_value()


def difference_with_reversed_sign(a, b, x):
  # Not an addition, and must not be sent as one.
  a.assign(x - a)
  return a.read_value()


def sums_of_older_values_in_a_branch(a, b, x):
  # Each assigned sum starts from an earlier value, not from the current one.
  def branch():
    before, other = a.read_value(), b.read_value()
    a.assign(a * 2.0)
    tf.cond(before[0] < 1e9, lambda: b.assign_sub(x), lambda: b.read_value())
    a.assign(before + x)
    b.assign(other + x)
    a.assign(a + 1.0)
    b.assign(x[0] + b)
    b.assign(b - x[1])
    return a + b

  return tf.cond(tf.reduce_sum(x) > -1e9, branch, lambda: x)


def written_in_a_loop(a, b, x):
  def body(i):
    a.assign_add(x)
    b.assign(a + b)
    return i + 1

  tf.while_loop(lambda i: i < 3, body, [0], parallel_iterations=1)
  return a + b


def gradients_of_a_loop(a, b, x):
  with tf.GradientTape() as tape:
    total = tf.while_loop(
      lambda i, s: i < 3,
      # Damped: gradients are summed in no fixed order, and steps would amplify it.
      lambda i, s: (i + 1, 0.1 * tf.sin(s * a) + b + tf.gather(a, [0, 0, 2])),
      [0, x],
    )[1]
    loss = tf.reduce_sum(total)
  for variable, gradient in zip(
    (a, b), tape.gradient(loss, [a, b]), strict=True
  ):
    variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
  return loss


def rows(a, b, x):
  a.assign_add(x)
  a.scatter_add(tf.IndexedSlices(tf.constant([10.0]), tf.constant([1])))
  a.assign_add(x)
  return tf.gather(a, [2, 2, 0]) + tf.gather_nd(a, [[0], [1], [1]])


@tf.function
def _add_and_scale(variable, x, times):
  for i in tf.range(times):
    if i % 2 == 0:
      variable.assign_add(x)
    else:
      variable.scatter_add(tf.IndexedSlices(x[:1], tf.constant([1])))
  return variable * 2.0


class _Layer:
  """Has methods that are `tf.function`s, like a layer."""

  def __init__(self, variable):
    self.variable = variable

  @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([])])
  def add(self, x, factor):
    self.variable.scatter_add(tf.IndexedSlices(x * factor, tf.range(3)))
    return self.variable.read_value()

  @tf.function(jit_compile=True)
  def scaled(self, x):
    return self.variable * x


_layers = {}
_plus_one = tf.function(lambda x: x + 1.0, jit_compile=True)


def _layer(variable):
  return _layers.setdefault(id(variable), _Layer(variable))


@tf.function
def _total(rows):
  total = 0.0
  for i in tf.range(3):
    total += rows[i]
  return total


def compiled_function_that_reads(a, b, x):
  found = _layer(a).scaled(x)
  tf.cond(x[0] > 0.0, lambda: a.assign_add(x), lambda: a.read_value())
  found += _layer(a).scaled(x)
  b.scatter_add(tf.IndexedSlices(x[:1], tf.constant([1])))
  return found + _layer(b).scaled(x) + _total(np.arange(3.0, dtype=np.float32))


def functions_made_before(a, b, x):
  found = _add_and_scale(a, x, 3) + _add_and_scale(b, x, 2)
  for variable in (a, b):
    found += _layer(variable).add(x, 2.0) + _plus_one(x)
  return found + _add_and_scale(a, x, 3)


PROGRAMS = (
  sum_after_overwrite,
  sums_of_infinities,
  sum_of_a_value_that_a_function_overwrites,
  difference_with_reversed_sign,
  sums_of_older_values_in_a_branch,
  written_in_a_loop,
  gradients_of_a_loop,
  rows,
  functions_made_before,
  compiled_function_that_reads,
)


SPEC = tf.TensorSpec([3], tf.float32)


class Step:
  """Runs a program like a step on a worker and the chief."""

  def __init__(self, program, variables, *specs, optimizers=()):
    def run(batch):
      return program(*variables, *batch)

    batch = batch_message.BatchLayout(specs)
    self._step = engine.Step(run, trains=True, optimizers=optimizers)
    self.traced = traced_step.TracedStep(run, optimizers, specs)
    self.worker = slots.WorkerFunction(self.traced, batch, None)
    self.layout = self.worker.layout
    self._slots = slots.Slots(self.layout.specs)

  @functools.cached_property
  def _apply(self):
    return slots.ApplyFunction(
      self._step, self.worker, 1, lambda f, *args: f(*args), reports=True
    )

  def __call__(self, *batch):
    return self.apply(self.compute(*batch))

  def compute(self, *batch):
    """Does the part of the worker, which writes no variable."""
    message = batch_message.Batch(tuple(map(np.asarray, batch))).message()
    # pylint: disable-next=protected-access
    return self.worker._function(tf.constant(message), *self._slots.handles)

  def apply(self, computed=None):
    """Does the part of the chief. Returns the results."""
    outputs = self.traced.outputs
    if self.layout.specs:
      numbers = self._apply([self._slots])
      computed = numbers if outputs.are_numbers else computed
    found = [each.numpy() for each in computed]
    return tf.nest.pack_sequence_as(outputs.structure, found)
