"""`DynamicEmbedding`: an embedding of 64-bit ids, without a vocabulary."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.keras.tables import row_initializers, row_table


@keras.saving.register_keras_serializable('tf_strategies')
class DynamicEmbedding(keras.layers.Layer):
  """Turns any number of different 64-bit integers into vectors.

  It is like `keras.layers.Embedding` without a fixed vocabulary: every integer has a
  row. The initial row depends on the id and `seed` only, so it is the same on every
  worker. A row is stored when it is first trained. `evaluate` and `predict` store
  nothing; they use the initial row of an unknown id. Ids may be ragged or sparse.

  On one device, rows are in the host's memory. Under `ParameterServerStrategy`, a hash
  of the id distributes them over the servers, and each step moves the rows that its
  batch uses. `model.save`, `save_weights`, `tfs.Run` and the checkpoints of parameter
  servers contain all rows with their optimizer state, and load onto any number of
  servers. `get_weights` does not contain the rows. `model.export` contains them on one
  device.

  The compiled optimizer's own rule updates the rows. Rows that a batch does not use do
  not change. For Adagrad, and for SGD without momentum, this equals
  `keras.layers.Embedding`. In Keras, Adam, RMSprop, momentum and FTRL also change rows
  that are not in the batch. Here these optimizers are lazy.

  Example:

    >>> import keras
    >>> import numpy as np
    >>> import tf_strategies as tfs
    >>> layer = tfs.keras.DynamicEmbedding(4, seed=1)
    >>> model = keras.Sequential([
    ...   keras.Input([2], dtype='int64'), layer, keras.layers.Flatten(),
    ...   keras.layers.Dense(1)])
    >>> model.compile('adagrad', 'mse')
    >>> users = np.array([[5, -7], [2**60, 5]])
    >>> history = model.fit(users, np.ones([2, 1]), verbose=0)
    >>> layer.report()['rows']
    3
    >>> layer.expire(min_uses=2)  # 5 was used twice, -7 and 2**60 once.
    2

  Args:
    output_dim: length of a row.
    embeddings_initializer: as for `keras.layers.Embedding`: 'uniform', 'normal',
      a Keras initializer that draws each number independently, or a constant. It may
      also be a function from ids [n] to rows [n, output_dim] whose results depend on
      the ids only. Register such a function with `keras.saving` to save the model.
    seed: seed of the initial rows. Tables with the same seed have the same initial
      rows, so give each table of a model its own.
    **kwargs: arguments of `keras.layers.Layer`.

  Raises:
    UnsupportedOptionError: if the initializer needs the number of rows, or the dtype
      is not float32. Also in `build`, if the strategy copies variables.
  """

  def __init__(
    self,
    output_dim: int,
    embeddings_initializer: Any = 'uniform',
    seed: int = 0,
    **kwargs,
  ):
    super().__init__(**kwargs)
    option_checks.check_int('output_dim', output_dim, 1)
    option_checks.check_int('seed', seed, 0)
    option_checks.check(
      self.variable_dtype == 'float32',
      f'dtype={self.variable_dtype!r}',
      "dtype='float32' of a DynamicEmbedding",
      "leave it out, or take the policy 'mixed_bfloat16'",
    )
    self.supports_jit = (
      False  # XLA has no hash tables, so Keras compiles without XLA.
    )
    self.output_dim, self.seed = int(output_dim), int(seed)
    self.embeddings_initializer = row_initializers.get(embeddings_initializer)
    self._initial_rows = row_initializers.initial_rows(
      self.embeddings_initializer, self.seed, self.output_dim
    )
    self._table: row_table.RowTable | None = None

  def build(self, input_shape=None):
    """Creates the table. Rows are added when they are trained."""
    del input_shape
    strategy = tf.distribute.get_strategy()
    make = getattr(strategy.extended, 'make_row_table', None)
    option_checks.check(
      make is not None
      or not tf.distribute.has_strategy()
      or isinstance(strategy, tf.distribute.OneDeviceStrategy),
      f'{type(strategy).__name__}',
      'one device or ParameterServerStrategy for a DynamicEmbedding',
      'train it there, or use keras.layers.Embedding with hashed ids',
    )
    variable = self.add_weight(
      name='rows',
      shape=[1, self.output_dim],
      initializer='zeros',
      autocast=False,
    )
    if make is None:
      shard = row_table.TableShard(self.output_dim, self._initial_rows)
      self._table = row_table.RowTable(variable, [shard])
      self._exported = shard.tracked  # TensorFlow tracks it for `model.export`.
    else:
      self._table = make(variable, self._initial_rows)
    variable.row_table = self._table
    variable.numpy = _refuse_weights
    self.built = True

  def call(self, inputs):
    """Returns the rows of ids of any shape. Ids may be ragged or sparse."""
    rows = _keras_internal.rows_of(inputs, self._to_ids, self._read)
    return tf.cast(rows, self.compute_dtype)

  def _to_ids(self, inputs):
    option_checks.check(
      inputs.dtype.is_integer,
      f'{inputs.dtype.name} ids in {self.name!r}',
      'integer ids',
      "declare the input as keras.Input(shape, dtype='int64')",
    )
    return tf.cast(inputs, tf.int64)

  def _read(self, ids):
    rows = self._table.read(tf.reshape(ids, [-1]))
    shape = tf.concat([tf.shape(ids), [self.output_dim]], 0)
    rows = tf.reshape(rows, shape)
    rows.set_shape([*ids.shape, self.output_dim])
    return rows

  def compute_output_shape(self, input_shape):
    """Returns the shape of the ids with one more dimension."""
    return (*input_shape, self.output_dim)

  def compute_output_spec(self, inputs):
    """Returns the spec of the output, which is ragged if the ids are."""
    return keras.KerasTensor(
      self.compute_output_shape(inputs.shape),
      self.compute_dtype,
      ragged=getattr(inputs, 'ragged', False),
    )

  def report(self) -> dict[str, Any]:
    """Returns the number of stored rows, in total and by server, and of expired
    rows.
    """
    return self._built_table().report()

  def usage(self) -> dict[str, np.ndarray]:
    """Returns the stored 'ids', their 'uses' in training and their last 'steps'."""
    return self._built_table().usage()

  def expire(
    self, max_age: int | None = None, min_uses: int | None = None
  ) -> int:
    """Removes old or rare rows, and returns their number.

    A removed row that is used again starts from its initial value. For example in a
    callback: `LambdaCallback(on_epoch_end=lambda *_:
    layer.expire(max_age=10_000, min_uses=5))`. With both arguments, a row must be old
    and rare to be removed.

    Args:
      max_age: removes rows that were not trained in the last `max_age` steps before
        the table's newest step.
      min_uses: removes rows that were trained fewer times. Each occurrence in a batch
        counts.

    Raises:
      UnsupportedOptionError: if no argument is given, or one is not an integer >= 0.
    """
    option_checks.check(
      max_age is not None or min_uses is not None,
      'expire() without arguments',
      'a rule that says which rows expire',
      'pass max_age, min_uses or both',
    )
    for name, value in (('max_age', max_age), ('min_uses', min_uses)):
      if value is not None:
        option_checks.check_int(
          name, value, 0, fix='write expire(max_age=1000)'
        )
    return self._built_table().expire(max_age, min_uses)

  def _built_table(self) -> row_table.RowTable:
    option_checks.check(
      self._table is not None,
      f'layer {self.name!r}, which is not built',
      'a built layer',
      'call it, or the model that it is in, with ids first',
    )
    return self._table

  def save_own_variables(self, store):
    """Saves all rows and the optimizer's state of them."""
    table = self._built_table()
    for column in [*table.columns(), *table.slot_columns()]:
      store[column.path.split('/')[-1]] = column.numpy()

  def load_own_variables(self, store):
    """Loads what `save_own_variables` saved."""
    table = self._built_table()
    if 'ids' not in store or 'rows' not in store:
      raise errors.CheckpointMismatchError(
        f'Expected rows of {self.name!r} in the file, got none. Fix: load a '
        'file that a model with this layer has saved.'
      )
    names = sorted(set(store.keys()) - {'ids', 'rows'})
    for column in [*table.columns(), *table.load_slots(names)]:
      column.assign(store[column.path.split('/')[-1]])

  def get_config(self):
    """Returns the configuration of the layer, without its rows."""
    return {
      **super().get_config(),
      'output_dim': self.output_dim,
      'embeddings_initializer': keras.initializers.serialize(
        self.embeddings_initializer
      ),
      'seed': self.seed,
    }


def _refuse_weights():
  raise errors.UnsupportedOptionError(
    'get_weights(), as EarlyStopping(restore_best_weights=True) calls it',
    'model.save or save_weights of a model with a DynamicEmbedding',
    'use model.save, model.save_weights or ModelCheckpoint. Rows are no '
    'array of a fixed shape',
  )
