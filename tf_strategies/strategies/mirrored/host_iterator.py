"""Iterators of distributed batches that Python cannot loop over in a graph.

In a `tf.function`, Python's `for` asks an iterator for batch after batch while
the graph is built, and there is no last one: what AutoGraph does not convert
(`enumerate`, `zip`, a comprehension, `autograph=False`) would trace without end.
"""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import _tf_internal, errors


class LoopError(errors.UnsupportedOptionError, NotImplementedError):
  """A loop of Python's over a distributed iterator, while a graph is built.

  It is a `NotImplementedError` too, which TensorFlow's strategies raise.
  """


class HostIterator(_tf_internal.OwnedIterator):
  """A `tf.data.Iterator` that raises where Python would loop without end."""

  def __iter__(self):
    if not tf.executing_eagerly():
      raise LoopError(
        "a loop of Python's (enumerate, zip, a comprehension, or any with "
        'autograph=False) over a distributed iterator inside of a tf.function',
        'a `for` that AutoGraph converts, or next(iterator)',
        'write `for batch in iterator:` and keep a counter of your own, or loop '
        'outside of the tf.function',
      )
    return super().__iter__()

  def __next__(self):
    if (
      tf.distribute.has_strategy()
      and not tf.distribute.in_cross_replica_context()
    ):
      # Each replica would take a batch of all of them.
      raise errors.UnsupportedOptionError(
        'next(iterator) of a distributed iterator inside of a replica',
        'it where strategy.run is called',
        'write strategy.run(step, args=(next(iterator),))',
      )
    return super().__next__()

  @property
  def _type_spec(self):
    return _HostIteratorSpec(self.element_spec)


class _HostIteratorSpec(tf.data.IteratorSpec):
  """Type of a `HostIterator`, which stays one as an argument of a function."""

  __slots__ = ()

  value_type = property(lambda self: HostIterator)

  def _from_components(self, components):
    return HostIterator(components=components, element_spec=self._element_spec)


class HostDataset(_tf_internal.UnaryUnchangedStructureDataset):
  """`dataset`, with iterators that are `HostIterator`s."""

  def __init__(self, dataset: tf.data.Dataset):
    super().__init__(dataset, dataset._variant_tensor)  # pylint: disable=protected-access

  def __iter__(self):
    iterator = super().__iter__()
    # Made where and when TensorFlow makes it, which it offers no other way to say.
    iterator.__class__ = HostIterator
    return iterator
