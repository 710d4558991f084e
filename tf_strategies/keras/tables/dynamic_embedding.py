"""`DynamicEmbedding`: an embedding of 64-bit ids, without a vocabulary.

A row is made where it is first needed: on any worker or server, in any order. A
random generator with state cannot do this. Instead, column j of the row of an
id is a hash of seed, id and j (splitmix64, as in Steele et al. 2014, "Fast
splittable pseudorandom number generators"), mapped to the distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.keras.tables import row_table

_BITS = 23  # Bits of a random number. With a half added, it fills a float32.
_GOLDEN = 0x9E3779B97F4A7C15
# Probability that a normal number is below minus two standard deviations.
_BELOW_MINUS_TWO = 0.02275013194817921
_SEEDED = {
  'RandomUniform': ('minval', 'maxval'),
  'RandomNormal': ('mean', 'stddev'),
  'TruncatedNormal': ('mean', 'stddev'),
}
_CONSTANTS = ('Zeros', 'Ones', 'Constant')

InitialRows = Callable[[tf.Tensor], tf.Tensor]


def mix(x: tf.Tensor) -> tf.Tensor:
  """Returns the splitmix64 hash of 64-bit integers, as uint64."""
  z = tf.bitcast(x, tf.uint64) + _word(_GOLDEN)
  z = _xor_shift(z, 30) * _word(0xBF58476D1CE4E5B9)
  z = _xor_shift(z, 27) * _word(0x94D049BB133111EB)
  return _xor_shift(z, 31)


def _xor_shift(z, bits):
  return tf.bitwise.bitwise_xor(z, _shift(z, bits))


def _shift(z, bits):
  return tf.bitwise.right_shift(z, _word(bits))


def _word(value: int) -> tf.Tensor:
  return tf.constant(value % 2**64, tf.uint64)


def owner(ids: tf.Tensor, count: int) -> tf.Tensor:
  """Returns the part, of `count` parts of a table, that has each id, as int32."""
  hashed = tf.cast(_shift(mix(ids), 33), tf.int64)
  return tf.cast(hashed % count, tf.int32)


def get(initializer: Any) -> Any:
  """Returns the initializer or function for an argument.

  Raises:
    UnsupportedOptionError: if the argument does not describe one.
  """
  try:
    found = keras.initializers.get(initializer)
  except (TypeError, ValueError):
    found = None
  option_checks.check_function(
    'embeddings_initializer',
    initializer if found is None else found,
    "write 'uniform', an initializer of Keras's or a function of ids",
  )
  return found


def initial_rows(initializer: Any, seed: int, width: int) -> InitialRows:
  """Returns a function from ids [n] to float32 rows [n, width].

  Args:
    initializer: a Keras initializer that draws each number independently, or a
      function from ids to rows.
    seed: seed of random initializers.
    width: length of a row.

  Raises:
    UnsupportedOptionError: names the initializer.
  """
  if not isinstance(initializer, keras.initializers.Initializer):
    return lambda ids: _checked(initializer(ids), width)
  kind = type(initializer).__name__
  config = initializer.get_config()
  if kind in _CONSTANTS and np.ndim(config.get('value', 0)) == 0:
    return lambda ids: tf.fill(
      [tf.size(ids), width], initializer((), 'float32')
    )
  option_checks.check(
    kind in _SEEDED,
    f'embeddings_initializer={kind} of a DynamicEmbedding',
    f'{", ".join([*_SEEDED, *_CONSTANTS])} of a number, or a '
    'function from ids to rows',
    'write for instance keras.initializers.RandomNormal(stddev=0.05), or '
    "'uniform'. No table has a shape that could scale it",
  )
  option_checks.check(
    config.get('seed') is None,
    f'embeddings_initializer={kind}(seed={config["seed"]!r})',
    'an initializer without a seed',
    'pass seed= to DynamicEmbedding instead',
  )
  first, second = (float(config[name]) for name in _SEEDED[kind])

  def random_rows(ids):
    numbers = _uniform(ids, seed, width)
    if kind == 'RandomUniform':
      return tf.cast(first + (second - first) * numbers, tf.float32)
    if kind == 'TruncatedNormal':
      numbers = _BELOW_MINUS_TWO + (1 - 2 * _BELOW_MINUS_TWO) * numbers
    return tf.cast(first + second * tf.math.ndtri(numbers), tf.float32)

  return random_rows


def _uniform(ids, seed, width):
  """Returns numbers between 0 and 1, both excluded.

  They are computed in float64. The last bits of a kernel's result may depend on
  the position in the tensor, but they do not survive the rounding to float32.
  """
  seeded = tf.bitwise.bitwise_xor(mix(ids), mix(_word(seed)))
  # Uses NumPy. In a function, TensorFlow converts a list with integers below
  # and above 2**63 to float64, which rounds them.
  columns = tf.constant(
    np.array([(j * _GOLDEN) % 2**64 for j in range(width)], np.uint64)
  )
  bits = _shift(mix(seeded[:, None] + columns), 64 - _BITS)
  numbers = tf.cast(tf.cast(bits, tf.int32), tf.float64)
  return (numbers + 0.5) * 2.0**-_BITS


def _checked(rows, width):
  rows = tf.convert_to_tensor(rows)
  if rows.shape.rank != 2 or rows.shape[1] != width:
    raise errors.UnsupportedOptionError(
      f'shape {rows.shape} from embeddings_initializer',
      f'rows of shape [number of ids, {width}]',
      'return one row for each id',
    )
  return tf.cast(rows, tf.float32)


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
    >>> history = model.fit(users, np.ones([2, 1]), batch_size=1, verbose=0)
    >>> layer.report()['rows']
    3
    >>> layer.expire(min_uses=2)  # Two steps used 5, one -7, one 2**60.
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
    self.embeddings_initializer = get(embeddings_initializer)
    self._initial_rows = initial_rows(
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
    rows = _keras_internal.rows_of(inputs, self._to_ids, self._table.read)
    return tf.cast(rows, self.compute_dtype)

  def _to_ids(self, inputs):
    option_checks.check(
      inputs.dtype.is_integer,
      f'{inputs.dtype.name} ids in {self.name!r}',
      'integer ids',
      "declare the input as keras.Input(shape, dtype='int64')",
    )
    return tf.cast(inputs, tf.int64)

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
    """Returns the stored 'ids', the number of steps that trained each ('uses'), and
    the last one ('steps').
    """
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
      min_uses: removes rows that fewer steps have trained.

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
      store[column.key] = column.numpy()

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
      column.assign(store[column.key])

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
