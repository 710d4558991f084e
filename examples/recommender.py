"""Rates films for people: two towers on large tables, with Keras's `fit`.

  python examples/recommender.py

trains in one process, offline, on ratings that it makes itself, as files in the layout of
MovieLens (`ratings.csv`, `movies.csv`). On two workers and two parameter servers every
task runs the same command:

  tfs launch --num_workers=2 --num_ps=2 --chief -- \\
    python examples/recommender.py --strategy=parameter_server

There the tables of people and films lie on the servers, and a step reads and writes
the rows of its batch only. With --checkpoint_dir an interrupted run goes on. At the end
the model is saved (--export), loaded on one device, and must predict the same.
"""

import csv
import os
import pathlib
import sys
import tempfile

import numpy as np
from absl import app, flags

if not __package__:  # Run as a file: the packages are one directory up.
  sys.path.insert(
    0, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  )

import tf_strategies as tfs

FLAGS = flags.FLAGS
_STRATEGIES = ('one_device', 'parameter_server')
_GENRES = ('Action', 'Comedy', 'Crime', 'Documentary', 'Drama', 'Romance')
_TASTES = 4
_TEST_SHARE = 0.1

flags.DEFINE_enum('strategy', 'one_device', _STRATEGIES, 'Who trains.')
flags.DEFINE_enum('mode', 'async', ['async', 'sync'], 'Of parameter servers.')
flags.DEFINE_string('data_dir', None, 'MovieLens files. Default: made here.')
flags.DEFINE_integer('num_users', 2000, 'People, if ratings are made.', 1)
flags.DEFINE_integer('num_movies', 500, 'Films, if ratings are made.', 1)
flags.DEFINE_integer('num_ratings', 40_000, 'If they are made.', 100)
flags.DEFINE_integer('dimensions', 16, 'Of a tower.', 1)
flags.DEFINE_integer('batch_size', 256, 'Ratings in a step.', 1)
flags.DEFINE_integer('epochs', 5, 'Passes over the ratings.', 1)
flags.DEFINE_string('optimizer', 'adagrad', "By Keras's name for it.")
flags.DEFINE_float(
  'learning_rate', None, "0.3 of Adagrad; else Keras's.", 1e-12
)
flags.DEFINE_integer('seed', 0, 'Of weights and order.', 0)
flags.DEFINE_string('checkpoint_dir', None, 'Of parameter servers.')
flags.DEFINE_string('export', None, 'A .keras file for the trained model.')


def write_ratings(directory: pathlib.Path) -> None:
  """Makes `ratings.csv` and `movies.csv`: what people's tastes say of films' genres."""
  random = np.random.default_rng(1)
  films, people = FLAGS.num_movies, FLAGS.num_users
  genres = random.random([films, len(_GENRES)]) < 0.3
  film = random.normal(size=[films, _TASTES]) + genres @ random.normal(
    size=[len(_GENRES), _TASTES]
  )
  person = random.normal(size=[people, _TASTES])
  with open(directory / 'movies.csv', 'w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(['movieId', 'title', 'genres'])
    for number, has in enumerate(genres, 1):
      names = '|'.join(np.array(_GENRES)[has]) or '(no genres listed)'
      writer.writerow([number, f'Film {number}', names])
  # Some films and people are met often, most rarely.
  users = np.minimum(random.zipf(1.3, FLAGS.num_ratings), people) - 1
  movies = (random.pareto(1.0, FLAGS.num_ratings) * 20).astype(int) % films
  users = (users * 7919 + random.integers(0, 97, len(users))) % people
  liked = np.sum(person[users] * film[movies], 1) / _TASTES
  stars = np.clip(np.round(2 * (3.5 + liked)) / 2, 0.5, 5.0)
  with open(directory / 'ratings.csv', 'w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(['userId', 'movieId', 'rating', 'timestamp'])
    for when, row in enumerate(zip(users + 1, movies + 1, stars, strict=True)):
      writer.writerow([*row, 1_000_000_000 + when])


def read_genres(directory: pathlib.Path) -> tuple[list[int], np.ndarray]:
  """Ids of the films, and which of `_GENRES` each has, [films, genres]."""
  with open(directory / 'movies.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  has = [[g in row['genres'].split('|') for g in _GENRES] for row in rows]
  return [int(row['movieId']) for row in rows], np.float32(has)


def read_ratings(directory: pathlib.Path):
  """The columns of `ratings.csv` that are learnt from, in the order of the file."""
  with open(directory / 'ratings.csv', newline='') as file:
    rows = np.array(list(csv.reader(file))[1:])
  return (
    {'user': rows[:, 0].astype(np.int64), 'movie': rows[:, 1].astype(np.int64)},
    rows[:, 2].astype(np.float32),
  )


def split(ratings):
  """Splits ratings into the first ones, for training, and the last ones, for tests."""
  columns, stars = ratings
  end = round(len(stars) * (1 - _TEST_SHARE))
  first = {name: column[:end] for name, column in columns.items()}
  last = {name: column[end:] for name, column in columns.items()}
  return (first, stars[:end]), (last, stars[end:])


def batches(ratings, *, training):
  """Batches of ratings; in training of all epochs, each in an order of its own."""
  columns, stars = ratings
  return tfs.data.make_dataset(
    (columns['user'], columns['movie'], stars),
    tfs.data.PipelineOptions(
      global_batch_size=FLAGS.batch_size, seed=FLAGS.seed
    ),
    training=training,
    epochs=FLAGS.epochs if training else None,
    map_fn=lambda user, movie, stars: ({'user': user, 'movie': movie}, stars),
  )


def make_optimizer():
  """The optimizer that the flags say."""
  import keras

  optimizer = keras.optimizers.get(FLAGS.optimizer)
  rate = FLAGS.learning_rate or {'adagrad': 0.3}.get(FLAGS.optimizer)
  if rate is not None:
    optimizer.learning_rate = rate
  return optimizer


def build_model(strategy, users, movies, genres):
  """Builds two towers whose product is a rating. Tables have a row for each name."""
  import keras

  layers = keras.layers
  keras.utils.set_random_seed(FLAGS.seed)
  with strategy.scope():
    user = keras.Input([], dtype='int64', name='user')
    movie = keras.Input([], dtype='int64', name='movie')
    user_row = layers.IntegerLookup(vocabulary=users)(user)
    movie_row = layers.IntegerLookup(vocabulary=movies)(movie)

    def rows(name, count, width):
      return layers.Embedding(count + 1, width, name=name)

    known = layers.Embedding(
      len(movies) + 1,
      len(_GENRES),
      weights=[np.vstack([np.zeros([1, len(_GENRES)]), genres])],
      trainable=False,
      name='genres',
    )
    film = layers.add(
      [
        rows('movies', len(movies), FLAGS.dimensions)(movie_row),
        layers.Dense(FLAGS.dimensions, use_bias=False)(known(movie_row)),
      ]
    )
    person = rows('users', len(users), FLAGS.dimensions)(user_row)
    liked = layers.Dot(axes=1)([person, film])
    general = layers.add(
      [
        rows('kindness', len(users), 1)(user_row),
        rows('fame', len(movies), 1)(movie_row),
      ]
    )
    stars = layers.add([liked, general])
    stars = layers.Rescaling(1.0, offset=3.5, name='stars')(stars)
    model = keras.Model({'user': user, 'movie': movie}, stars)
    model.compile(
      make_optimizer(),
      'mse',
      metrics=[keras.metrics.RootMeanSquaredError(name='rmse')],
      jit_compile=False,
    )
  return model


def train() -> dict[str, float]:
  """Trains in this task; what the test says of the trained model."""
  import keras

  options = {}
  if FLAGS.strategy == 'parameter_server':
    options = {'mode': FLAGS.mode, 'checkpoint_dir': FLAGS.checkpoint_dir}
  strategy = tfs.create_strategy(FLAGS.strategy, **options)
  with tempfile.TemporaryDirectory() as made:
    directory = pathlib.Path(FLAGS.data_dir or made)
    if FLAGS.data_dir is None:
      write_ratings(directory)
    movies, genres = read_genres(directory)
    ratings = read_ratings(directory)
  users = np.unique(ratings[0]['user'])
  training, test = split(ratings)
  model = build_model(strategy, users, movies, genres)
  callbacks = []
  if options.get('checkpoint_dir'):
    callbacks.append(tfs.Run(FLAGS.checkpoint_dir, model))
  model.fit(
    batches(training, training=True),
    epochs=FLAGS.epochs,
    steps_per_epoch=-(-len(training[1]) // FLAGS.batch_size),
    callbacks=callbacks,
    shuffle=False,  # The pipeline does it.
    verbose=2,
  )
  found = model.evaluate(
    batches(test, training=False), return_dict=True, verbose=0
  )
  mean = float(np.std(test[1] - training[1].mean()))
  print(f'rmse {found["rmse"]:.6f}; who always says the mean has {mean:.6f}')
  if FLAGS.export:
    model.save(FLAGS.export)
    some = {name: column[:100] for name, column in test[0].items()}
    loaded = keras.models.load_model(FLAGS.export)
    np.testing.assert_allclose(
      loaded.predict(some, verbose=0),
      model.predict(some, verbose=0),
      atol=1e-5,
    )
    print(f'{FLAGS.export} predicts the same on one device')
  return {**found, 'rmse_of_the_mean': mean}


def main(argv):
  """Does the part of this task: it trains, or serves variables."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  tfs.cluster.run_task(train)


if __name__ == '__main__':
  app.run(main)
