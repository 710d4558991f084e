"""One frozen options object for every input pipeline."""

import dataclasses

from tf_strategies import option_checks

CACHES = ('none', 'memory')

# The largest seed that the int64 attribute of tf.data's random ops holds.
_MAX_SEED = 2**63 - 1


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class PipelineOptions:
  """How an input pipeline shuffles, batches and caches.

  Pipelines read files, map and prefetch in parallel, as `tf.data.AUTOTUNE`
  decides, and keep one order in spite of that.

  Example:

    >>> PipelineOptions(global_batch_size=256, seed=7).cache
    'none'

  Attributes:
    global_batch_size: examples in one step, summed over all replicas.
    shuffle_buffer: examples that the shuffle chooses from; None is the whole
      split (a uniform shuffle), 0 keeps the order. Only training shuffles.
      For arrays, any other number means the whole split too: only indices
      are shuffled, 8 bytes each. Files shuffle records, so a split that is
      larger than memory needs a number.
    seed: the seed of the shuffle and of augmentation. The same seed gives the
      same sequence of epochs, each with an order of its own, whatever
      `tf.random.set_seed` says; None differs from run to run. Workers that
      share one dataset need the same seed.
    cache: where parsed and prepared examples stay after the first epoch:
      'none' or 'memory'. The cache stands before the shuffle, so that every
      epoch has another order. For arrays, 'memory' keeps the results of
      `prepare_fn`.
    drop_remainder: leave out a training epoch's last, partial batch, so that
      shapes are static. Evaluation never drops an example.

  Raises:
    UnsupportedOptionError: for a value out of its range; the message names
      the option, its value, the expected values and the fix.
  """

  global_batch_size: int
  shuffle_buffer: int | None = None
  seed: int | None = None
  cache: str = 'none'
  drop_remainder: bool = False

  def __post_init__(self):
    option_checks.check_int(
      'global_batch_size',
      self.global_batch_size,
      1,
      fix='pass the number of examples of one training step over all replicas, '
      'such as 256',
    )
    # The docstring says what None and 0 stand for.
    for name, most in (('shuffle_buffer', None), ('seed', _MAX_SEED)):
      value = getattr(self, name)
      if value is not None:
        option_checks.check_int(name, value, 0, most)
    option_checks.check_choice('cache', self.cache, CACHES)
    option_checks.check_bool(
      'drop_remainder',
      self.drop_remainder,
      'write drop_remainder=True or drop_remainder=False',
    )
