"""The recommender on parameter servers equals one device, with each optimizer.

A case is an optimizer, who trains, and into how many parts tables are cut. Chiefs train
all cases one after the other; weights and all state of the optimizer are compared.
"""

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers, processes, tiers
from tf_strategies.strategies.parameter_server import microbatch, variables

optimizers = keras.optimizers
LossScale = optimizers.LossScaleOptimizer
LazyRows = tfs.keras.LazyRows
partitioners = tf.distribute.experimental.partitioners

_TOLERANCE = 1e-6
_PEOPLE, _FILMS = list(range(100, 123)), list(range(7, 18))
# Two epochs of three batches, of which the last has 5 rows: two workers have 3 and 2.
_ROWS, _BATCH, _EPOCHS = 21, 8, 2


def _by_kind():
  adam, sgd = optimizers.Adam(0.01), optimizers.SGD(0.1)
  return optimizers.MultiOptimizer(lambda v: adam if 'users' in v.path else sgd)


_OPTIMIZERS = {
  'sgd': lambda: optimizers.SGD(0.1),
  'momentum': lambda: optimizers.SGD(0.05, momentum=0.9),
  'nesterov': lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
  'adagrad': lambda: optimizers.Adagrad(0.1),
  'adam': lambda: optimizers.Adam(0.01, amsgrad=True),
  'adamw': lambda: optimizers.AdamW(0.01, weight_decay=0.1),
  'ftrl': lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
  'rmsprop': lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
  'nadam': lambda: optimizers.Nadam(0.01),
  'lion': lambda: optimizers.Lion(0.01),
  'adamax': lambda: optimizers.Adamax(0.01),
  'adadelta': lambda: optimizers.Adadelta(1.0),
  'adafactor': lambda: optimizers.Adafactor(0.01),
  'lamb': lambda: optimizers.Lamb(0.01),
  'muon': lambda: optimizers.Muon(0.01),
  'lazy_adam': lambda: LazyRows(optimizers.Adam(0.01)),
  'lazy_momentum': lambda: LazyRows(optimizers.SGD(0.05, momentum=0.9)),
  'scaled_adagrad': lambda: LossScale(optimizers.Adagrad(0.1)),
  'scaled_adam': lambda: LossScale(optimizers.Adam(0.01)),
  'scaled_lazy_adam': lambda: LossScale(LazyRows(optimizers.Adam(0.01))),
  'accumulation': lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
  'clipvalue': lambda: optimizers.SGD(0.1, clipvalue=0.05),
  'clipnorm': lambda: optimizers.Adam(0.01, clipnorm=0.01),
  'global_clipnorm': lambda: optimizers.SGD(0.1, 0.9, global_clipnorm=0.05),
  'average': lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
  'scaled_average': lambda: LossScale(
    optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
  ),
  'average_that_overwrites': lambda: optimizers.SGD(
    0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
  ),
  'by_kind': _by_kind,
}
# Workers and mode.
_WHERE = {
  'async': (1, 'async'),
  'bounded': (1, 'bounded'),
  'sync': (1, 'sync'),
  'sync_of_two': (2, 'sync'),
}


class Case(NamedTuple):
  """What is trained, and where.

  Attributes:
    optimizer: key of _OPTIMIZERS.
    where: key of _WHERE.
    parts: of each table, on a server each.
    mutation: key of _MUTATIONS.
  """

  optimizer: str
  where: str
  parts: int
  mutation: str = ''

  @property
  def name(self) -> str:
    """Of its test."""
    return f'{self.optimizer}_{self.where}_{self.parts}'


_CASES = [
  Case(optimizer, where, parts)
  for parts in (1, 2)
  for where in _WHERE
  for optimizer in _OPTIMIZERS
]
# Each fails by itself if a mechanism does: rows one by one, lazily, in a branch, of a
# part, clipped.
_FEW = [
  Case('adagrad', 'sync_of_two', 2),
  Case('lazy_momentum', 'sync_of_two', 2),
  Case('clipnorm', 'bounded', 2),
  Case('scaled_lazy_adam', 'async', 2),
]
_FEW_GROUP = 'few'
# A job trains so many of them one after the other; a test has five minutes.
_AT_ONCE = 7


def _group(case: Case) -> str:
  """Cases that are trained at once: the few, or those of who trains."""
  if case in _FEW or case in _MUTATED[:2]:
    return _FEW_GROUP
  number = list(_OPTIMIZERS).index(case.optimizer) // _AT_ONCE
  return f'{case.where} {case.parts} {number}'


def _refusal(case: Case) -> str | None:
  """What the error says of a case that is refused."""
  if case.parts > 1 and case.optimizer in ('adafactor', 'lamb', 'muon'):
    return f'{case.optimizer.title()} with partitioned variable.*Adam or SGD'
  return None


def _without_repeated(variable, dy, indices):
  """The gradient of a lookup, in which only the first of equal rows counts."""
  places = tf.unique(tf.reshape(indices, [-1])).idx
  is_first = tf.equal(places, tf.range(tf.size(places)))
  is_first = tf.reshape(tf.cast(is_first, dy.dtype), tf.shape(indices))
  return _gradient(variable, dy * is_first[..., None], indices)


_gradient = variables._gradient_of_rows
_MUTATIONS = {
  'repeated_rows_are_lost': (variables, '_gradient_of_rows', _without_repeated),
  'shares_count_alike': (
    microbatch,
    '_weights',
    lambda rows: [tf.constant(1 / len(rows))] * len(rows),
  ),
}
_MUTATED = [
  Case('adagrad', 'sync_of_two', 2, 'repeated_rows_are_lost'),
  Case('sgd', 'sync_of_two', 1, 'shares_count_alike'),
  Case('adam', 'async', 1, 'repeated_rows_are_lost'),
  Case('lazy_adam', 'sync_of_two', 2, 'repeated_rows_are_lost'),
]


def _train(name, strategy=None):
  """The weights, and the state of the optimizer."""
  # Here: in one process only one example's flags can be.
  from examples import recommender

  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['recommender', '--dimensions=4'])
  keras.backend.clear_session()
  rng = np.random.default_rng(5)
  genres = rng.integers(0, 2, [len(_FILMS), 6]).astype(np.float32)
  strategy = strategy or tf.distribute.get_strategy()
  model = recommender.build_model(strategy, _PEOPLE, _FILMS, genres)
  with strategy.scope():
    optimizer = _OPTIMIZERS[name]()
    # On one device eagerly: that takes no trace.
    is_eager = not tf.distribute.has_strategy()
    model.compile(optimizer, 'mse', run_eagerly=is_eager, jit_compile=False)
  # Few of them: in each batch some are there several times, and some never.
  ids = {
    'user': rng.choice(_PEOPLE[::3], _ROWS),
    'movie': rng.choice(_FILMS[1:6], _ROWS),
  }
  stars = rng.integers(1, 11, _ROWS).astype(np.float32) / 2
  callbacks = []
  if 'average' in name:
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
  model.fit(
    ids,
    stars,
    batch_size=_BATCH,
    epochs=_EPOCHS,
    callbacks=callbacks,
    shuffle=False,
    verbose=0,
  )
  return [*model.get_weights(), *(v.numpy() for v in optimizer.variables)]


def train_on_one_device(names):
  """In a process that is none of a cluster: what each optimizer makes."""
  return {name: _train(name) for name in names}


@functools.cache
def _wanted(names):
  """The same; a chief would listen at its port only when it has done that."""
  with processes.ProcessGroup(parameter_servers.DEADLINE_SECONDS) as group:
    group.start_function('one device', train_on_one_device, (names,))
    [outcome] = group.wait_for(['one device'])
  return outcome.result()


def train_all(cases):
  """In a chief: what servers make of each case, or the text of an error."""
  found = {}
  for case in cases:
    _, mode = _WHERE[case.where]
    strategy = tfs.ParameterServerStrategy(
      variable_partitioner=partitioners.FixedShardsPartitioner(case.parts),
      mode=mode,
    )
    mutation = contextlib.nullcontext()
    if case.mutation:
      mutation = mock.patch.object(*_MUTATIONS[case.mutation])
    try:
      with mutation:
        found[case] = _train(case.optimizer, strategy)
    except Exception as e:
      found[case] = f'{type(e).__name__}: {e}'
    finally:
      strategy.close()
  return found


@functools.cache
def _results(group):
  """What one device and servers make of a group; chiefs run beside each other."""
  chiefs, names = {}, {}
  for case in [*_FEW, *_MUTATED, *_CASES]:
    if _group(case) == group:
      workers, _ = _WHERE[case.where]
      # Each has about half of them.
      half = workers if group == _FEW_GROUP else case.parts
      chiefs.setdefault((workers, half), {})[case] = None
      names[case.optimizer] = None
  wanted = _wanted(tuple(sorted(names)))
  found = {}
  with contextlib.ExitStack() as stack:
    jobs = []
    for (workers, _), cases in chiefs.items():
      job = stack.enter_context(
        parameter_servers.Job(num_workers=workers, num_ps=2)
      )
      job.start_chief(train_all, (list(cases),))
      jobs.append(job)
    for job in jobs:
      found.update(job.wait().result())
  return {case: (wanted[case.optimizer], each) for case, each in found.items()}


def _largest_difference(wanted, found) -> float:
  """Of numbers; of large ones it is relative."""
  return max(
    np.max(np.abs(np.float64(w) - f) / max(1.0, np.max(np.abs(w))), initial=0)
    for w, f in zip(wanted, found, strict=True)
  )


class RecommenderTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(
    *[(case.name, case) for case in _FEW],
    *[tiers.soak(case.name, case) for case in _CASES if case not in _FEW],
  )
  def test_equals_one_device(self, case):
    wanted, found = _results(_group(case))[case]
    refusal = _refusal(case)
    if refusal is not None:
      self.assertIsInstance(found, str)
      self.assertRegex(found, f'(?s)^UnsupportedOptionError: .*{refusal}')
      return
    self.assertNotIsInstance(found, str, found)
    self.assertLessEqual(_largest_difference(wanted, found), _TOLERANCE)

  @tiers.named_parameters(
    *[(f'{case.mutation}_{case.name}', case) for case in _MUTATED[:2]],
    *[
      tiers.soak(f'{case.mutation}_{case.name}', case) for case in _MUTATED[2:]
    ],
  )
  def test_a_mutation_is_seen(self, case):
    wanted, found = _results(_group(case))[case]
    self.assertGreater(_largest_difference(wanted, found), 100 * _TOLERANCE)


if __name__ == '__main__':
  tf.test.main()
