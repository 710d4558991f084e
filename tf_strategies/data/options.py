"""One frozen options object for every input pipeline."""

import dataclasses

from tf_strategies import option_checks

# The value of tf.data.AUTOTUNE, written out so that options can be validated
# (in a launcher, say) without the seconds that importing TensorFlow takes.
AUTOTUNE = -1

CACHES = ('none', 'memory')
AUTOSHARDS = ('off', 'auto', 'data', 'file')

# The largest seed that the int64 attribute of tf.data's shuffle holds.
_MAX_SEED = 2**63 - 1


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class PipelineOptions:
  """How an input pipeline shuffles, batches, parallelises and caches.

  Example:

    >>> PipelineOptions(global_batch_size=256, seed=7).cache
    'none'

  Attributes:
    global_batch_size: examples in one step, summed over all replicas.
    shuffle_buffer: examples that the shuffle chooses from; None is the whole
      split (a uniform shuffle), 0 keeps the order. Only training shuffles.
      Arrays shuffle indices, 8 bytes each. Files shuffle the records, so a
      split larger than memory needs a number here.
    seed: the seed of the shuffle and of augmentation. The same seed gives the
      same sequence of epochs, each with an order of its own, whatever
      `tf.random.set_seed` says; None differs from run to run. Workers that
      share one dataset need the same seed.
    num_parallel_calls: parallel calls of a map or an interleave, or AUTOTUNE.
    prefetch: batches prepared ahead of the step; 0 for none, or AUTOTUNE. A
      strategy adds its own: ours hold one more batch, split for the replicas,
      where these are on CPUs; for GPUs see `tf.distribute.InputOptions`.
    cache: where parsed and prepared examples stay after the first epoch:
      'none' or 'memory'. The cache stands before the shuffle, so that every
      epoch has another order. For arrays, 'memory' keeps what `prepare_fn`
      returns.
    autoshard: how several input pipelines share the data: 'off' gives each
      everything, 'data' splits the examples, 'file' the files, 'auto' the
      files if they divide evenly and otherwise the examples.
    deterministic: keep the order whatever the parallelism. False may be
      faster where one file or one element is slower than the others.
    drop_remainder: leave out a training epoch's last, partial batch, so that
      shapes are static. Evaluation never drops an example.
    repeat: repeat the training split without end.

  Raises:
    UnsupportedOptionError: for a value out of its range; the message names
      the option, its value, what was expected and the fix.
  """

  global_batch_size: int
  shuffle_buffer: int | None = None
  seed: int | None = None
  num_parallel_calls: int = AUTOTUNE
  prefetch: int = AUTOTUNE
  cache: str = 'none'
  autoshard: str = 'auto'
  deterministic: bool = True
  drop_remainder: bool = False
  repeat: bool = False

  def __post_init__(self):
    option_checks.check_int(
      'global_batch_size',
      self.global_batch_size,
      1,
      fix='pass the number of examples of one training step over all replicas, '
      'such as 256',
    )
    # What None and 0 stand for is in the docstring.
    for name, most in (('shuffle_buffer', None), ('seed', _MAX_SEED)):
      value = getattr(self, name)
      if value is not None:
        option_checks.check_int(name, value, 0, most)
    self._check(
      'num_parallel_calls',
      option_checks.is_int(self.num_parallel_calls)
      and (self.num_parallel_calls == AUTOTUNE or self.num_parallel_calls > 0),
      'an integer of at least 1, or tf.data.AUTOTUNE (-1)',
      'leave it out to let tf.data choose',
    )
    option_checks.check_int(
      'prefetch',
      self.prefetch,
      AUTOTUNE,
      fix='write 0 for none, or leave it out for tf.data.AUTOTUNE (-1)',
    )
    option_checks.check_choice('cache', self.cache, CACHES)
    option_checks.check_choice('autoshard', self.autoshard, AUTOSHARDS)
    for name in ('deterministic', 'drop_remainder', 'repeat'):
      fix = f'write {name}=True or {name}=False'
      option_checks.check_bool(name, getattr(self, name), fix)
    option_checks.keep_plain(self)

  def _check(self, name: str, is_good: bool, allowed: str, fix: str):
    option_checks.check(
      is_good, f'{name}={getattr(self, name)!r}', allowed, fix
    )
