"""Trains a recommender on parameter servers, resumes, exports and serves it.

  tfs launch --num_workers=2 --num_ps=2 --chief -- python examples/recommender.py
  python examples/recommender.py serve

Interrupt the first command and start it again: it resumes from `recommender/`. The
second command runs in one process, without servers.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs

DIRECTORY = 'recommender'
USERS, FILMS, RATINGS = 2000, 500, 40_000


def make_ratings():
  """Returns users, films, ratings, and the tastes that determine the ratings."""
  random = np.random.default_rng(1)
  user = random.integers(0, USERS, RATINGS)
  film = random.integers(0, FILMS, RATINGS)
  tastes = [random.normal(size=[count, 4]) for count in (USERS, FILMS)]
  rating = np.float32((tastes[0][user] * tastes[1][film]).sum(1))
  return (user, film), rating, tastes


def train():
  """Trains or resumes an interrupted run, and exports the model."""
  strategy = tfs.create_strategy(
    'parameter_server', checkpoint_dir=f'{DIRECTORY}/checkpoints'
  )
  keras.utils.set_random_seed(1)
  with strategy.scope():
    inputs = [keras.Input([], dtype='int64', name=n) for n in ('user', 'film')]
    # The rows of a table are split among the servers. A step reads only its own rows.
    tables = [keras.layers.Embedding(n, 16) for n in (USERS, FILMS)]
    rows = [table(ids) for table, ids in zip(tables, inputs, strict=True)]
    model = keras.Model(inputs, keras.layers.Dot(axes=1)(rows))
    model.compile(tfs.keras.LazyRows(keras.optimizers.Adam(0.02)), 'mse')

  run = tfs.Run(f'{DIRECTORY}/checkpoints', model)
  run.restore()  # On servers, fit itself finds the epoch and the batch.
  ids, rating, _ = make_ratings()
  # A restarted run reads the ratings in the same order.
  fit = {'batch_size': 256, 'epochs': 5, 'shuffle': False}
  model.fit(ids, rating, callbacks=[run], **fit)

  model.save(f'{DIRECTORY}/model.keras')
  loaded = keras.models.load_model(f'{DIRECTORY}/model.keras')
  loaded.export(f'{DIRECTORY}/1', verbose=False)


def serve():
  """Recommends five films to a person, from the exported model."""
  model = tf.saved_model.load(f'{DIRECTORY}/1')
  films = tf.range(FILMS, dtype=tf.int64)
  liked = model.serve([tf.zeros_like(films) + 7, films])[:, 0]
  print('person 7 may like films', tf.math.top_k(liked, 5).indices.numpy())


if __name__ == '__main__':
  serve() if sys.argv[1:] == ['serve'] else tfs.cluster.run_task(train)
