"""`DynamicEmbedding`: an embedding of ids of 64 bits, without a vocabulary."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.keras import row_initializers, row_table


@keras.saving.register_keras_serializable('tf_strategies')
class DynamicEmbedding(keras.layers.Layer):
  """Turns integers of 64 bits into vectors, as many as come.

  As `keras.layers.Embedding`, but that nobody has to know the ids: any integer has a
  row. What it is before it is trained follows from the id and `seed`, so it is the same
  whoever asks for it first. It is stored when it is first trained; `evaluate` and
  `predict` store nothing and see the initial row of an id that is not known. Ids may be
  ragged or sparse.

  On one device rows are in memory of the host. Under `ParameterServerStrategy` they are
  spread over the servers by a hash of the id, and steps move the rows that their batch
  uses. `model.save`, `save_weights`, `tfs.Run` and the checkpoints of parameter
  servers have all rows with their state of the optimizer, and load onto any number of
  servers; `get_weights` has not. `model.export` has the rows, on one device.

  Rows are updated by the compiled optimizer's own rule, as that of Keras would update
  them, but rows that a batch does not use stay as they are. With SGD without momentum and
  Adagrad that is what `keras.layers.Embedding` does. Adam, RMSprop, momentum and FTRL
  move in Keras also rows that are not in the batch: here they are lazy.

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
    output_dim: how long a row is.
    embeddings_initializer: as that of `keras.layers.Embedding`: 'uniform', 'normal',
      or an initializer of Keras's that draws each number by itself, or a constant. Or a
      function from ids [n] to rows [n, output_dim], whose results depend on the ids
      alone; register it with `keras.saving` where models are saved.
    seed: of the initial rows. Tables with one seed have one row for an id: give each
      table of a model its own.
    **kwargs: of `keras.layers.Layer`.

  Raises:
    UnsupportedOptionError: an initializer that needs the number of rows, a dtype other
      than float32; when it is built, a strategy that has several copies of a
      variable.
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
      f'dtype={self.variable_dtype!r} of a DynamicEmbedding',
      'rows in float32',
      "leave it out, or take the policy 'mixed_bfloat16'",
    )
    self.supports_jit = (
      False  # XLA has no hash tables: Keras compiles without it.
    )
    self.output_dim, self.seed = int(output_dim), int(seed)
    self.embeddings_initializer = row_initializers.get(embeddings_initializer)
    self._initial_rows = row_initializers.initial_rows(
      self.embeddings_initializer, self.seed, self.output_dim
    )
    self._table: row_table.RowTable | None = None

  def build(self, input_shape=None):
    """Makes the table; rows come when they are trained."""
    del input_shape
    strategy = tf.distribute.get_strategy()
    make = getattr(strategy.extended, 'make_row_table', None)
    option_checks.check(
      make is not None
      or not tf.distribute.has_strategy()
      or isinstance(strategy, tf.distribute.OneDeviceStrategy),
      f'DynamicEmbedding under {type(strategy).__name__}',
      'one device, or ParameterServerStrategy: rows that come while a model trains '
      'have one place',
      'train it there, or use keras.layers.Embedding with hashed ids',
    )
    variable = self.add_weight(
      name='rows',
      shape=[1, self.output_dim],
      initializer='zeros',
      autocast=False,
    )
    if make is None:
      shard = row_table.Shard(self.output_dim, self._initial_rows)
      self._table = row_table.RowTable(variable, [shard])
      self._exported = shard.tracked  # By TensorFlow, for `model.export`.
    else:
      self._table = make(variable, self._initial_rows)
    variable.row_table = self._table
    variable.numpy = _refuse_weights
    self.built = True

  def call(self, inputs):
    """Rows of ids of any shape, also of ragged and sparse ones."""
    rows = _keras_internal.rows_of(inputs, self._to_ids, self._read)
    return tf.cast(rows, self.compute_dtype)

  def _to_ids(self, inputs):
    option_checks.check(
      inputs.dtype.is_integer,
      f'{inputs.dtype.name} as ids of {self.name!r}',
      'integers, since others have not 64 bits',
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
    """Ragged if the ids are."""
    return keras.KerasTensor(
      self.compute_output_shape(inputs.shape),
      self.compute_dtype,
      ragged=getattr(inputs, 'ragged', False),
    )

  def report(self) -> dict[str, Any]:
    """Returns how many rows are stored, all and by server, and how many have expired."""
    return self._built_table().report()

  def usage(self) -> dict[str, np.ndarray]:
    """'ids' that have rows; 'uses' in training, and the optimizer's last 'steps'."""
    return self._built_table().usage()

  def expire(
    self, max_age: int | None = None, min_uses: int | None = None
  ) -> int:
    """Removes rows, which begin anew if they are used again; returns how many.

    For instance in a callback: `LambdaCallback(on_epoch_end=lambda *_:
    layer.expire(max_age=10_000, min_uses=5))`. With both arguments, only rows go that
    are old and rare.

    Args:
      max_age: rows go that were not trained in the last so many steps before the
        newest one of the table.
      min_uses: rows go that were trained fewer times; each occurrence in a batch
        counts.

    Raises:
      UnsupportedOptionError: none of them, or one that is no integer from 0.
    """
    option_checks.check(
      max_age is not None or min_uses is not None,
      'expire() without arguments',
      'which rows expire',
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
        f'The file has no rows of {self.name!r}. Expected those of a DynamicEmbedding. '
        'Fix: load a file that a model with this layer has saved.'
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
    'get_weights() of a model with a DynamicEmbedding, as of '
    'EarlyStopping(restore_best_weights=True),',
    'what saves rows, which are no array of a fixed shape',
    'use model.save, model.save_weights or ModelCheckpoint',
  )
