"""A recommender of two towers with each optimizer: its weights and all state.

Each batch contains some rows of its tables several times, and some never.
"""

import functools
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests.programs import common
from tf_strategies.keras.tables import row_updates
from tf_strategies.strategies.parameter_server import slots

optimizers = keras.optimizers
LossScale = optimizers.LossScaleOptimizer
LazyRows = tfs.keras.LazyRows

_PEOPLE, _FILMS = list(range(100, 123)), list(range(7, 18))
# Batches have 8 rows; the last has 5, so two workers get 3 and 2.
_ROWS = 21


def _by_kind():
  adam, sgd = optimizers.Adam(0.01), optimizers.SGD(0.1)
  return optimizers.MultiOptimizer(lambda v: adam if 'users' in v.path else sgd)


OPTIMIZERS = {
  **common.OPTIMIZERS,
  'sgd': lambda: optimizers.SGD(0.1),
  'momentum': lambda: optimizers.SGD(0.05, momentum=0.9),
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


def _build(genres):
  """Builds the model: two towers whose product is a rating, and two biases."""
  layers = keras.layers
  keras.utils.set_random_seed(0)
  user = keras.Input([], dtype='int64', name='user')
  movie = keras.Input([], dtype='int64', name='movie')
  user_row = layers.IntegerLookup(vocabulary=_PEOPLE)(user)
  movie_row = layers.IntegerLookup(vocabulary=_FILMS)(movie)

  def rows(name, known, width, **options):
    return layers.Embedding(len(known) + 1, width, name=name, **options)

  genres = np.vstack([np.zeros([1, genres.shape[1]]), genres])
  known = rows(
    'genres', _FILMS, genres.shape[1], weights=[genres], trainable=False
  )
  film = layers.add(
    [
      rows('movies', _FILMS, 4)(movie_row),
      layers.Dense(4, use_bias=False)(known(movie_row)),
    ]
  )
  liked = layers.Dot(axes=1)([rows('users', _PEOPLE, 4)(user_row), film])
  biases = [
    rows('kindness', _PEOPLE, 1)(user_row),
    rows('fame', _FILMS, 1)(movie_row),
  ]
  stars = layers.Rescaling(1.0, offset=3.5)(layers.add([liked, *biases]))
  return keras.Model({'user': user, 'movie': movie}, stars)


def _train(name):
  rng = np.random.default_rng(5)
  model = _build(rng.integers(0, 2, [len(_FILMS), 6]).astype(np.float32))
  # Eagerly on one device, to save the time for tracing.
  is_eager = not tf.distribute.has_strategy()
  model.compile(
    OPTIMIZERS[name](), 'mse', run_eagerly=is_eager, jit_compile=False
  )
  ids = {
    'user': rng.choice(_PEOPLE[::3], _ROWS),
    'movie': rng.choice(_FILMS[1:6], _ROWS),
  }
  stars = rng.integers(1, 11, _ROWS).astype(np.float32) / 2
  callbacks = []
  if 'average' in name:
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
  common.fit(model, ids, stars, batch_size=8, callbacks=callbacks)
  state = [v.numpy() for v in model.optimizer.variables]
  common.trained.append(model)
  # Scaled by the largest value, so that differences are relative.
  return [v / max(1, np.abs(v).max()) for v in [*model.get_weights(), *state]]


def _without_repeated(variable, dy, indices):
  """Returns a lookup's gradient that counts only the first of repeated rows."""
  places = tf.unique(tf.reshape(indices, [-1])).idx
  is_first = tf.equal(places, tf.range(tf.size(places)))
  is_first = tf.reshape(tf.cast(is_first, dy.dtype), tf.shape(indices))
  return _gradient(variable, dy * is_first[..., None], indices)


_gradient = row_updates._gradient_of_rows
_MUTATIONS = {
  'repeated_rows_are_lost': (
    row_updates,
    '_gradient_of_rows',
    _without_repeated,
  ),
  'shares_count_alike': (
    slots,
    '_weights',
    lambda rows: [tf.constant(1 / len(rows))] * len(rows),
  ),
}


def _mutated(optimizer, mutation):
  def program():
    with mock.patch.object(*_MUTATIONS[mutation]):
      return _train(optimizer)

  return program


PROGRAMS = {
  f'recommender_{name}': functools.partial(_train, name) for name in OPTIMIZERS
}
# Faults that must change the results on servers.
MUTATED = {
  f'recommender_{optimizer}_where_{mutation}': _mutated(optimizer, mutation)
  for optimizer, mutation in (
    ('adagrad', 'repeated_rows_are_lost'),
    ('sgd', 'shares_count_alike'),
    ('adam', 'repeated_rows_are_lost'),
    ('lazy_adam', 'repeated_rows_are_lost'),
  )
}
