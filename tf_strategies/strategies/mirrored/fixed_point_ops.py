"""Reproducible sums as TensorFlow operations; see `collectives.fixed_point`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies.collectives import fixed_point

BLOCK_LENGTH = fixed_point.BLOCK_LENGTH
# Elements: with fewer, compiling a function costs more than it ever gains.
_COMPILED = 1 << 14


def exact_dtype(dtype: tf.DType) -> tf.DType:
  """The dtype in which values of a dtype are added up.

  Raises:
    UnsupportedOptionError: numbers that have no reproducible sums.
  """
  if dtype.is_integer:
    return dtype
  form = fixed_point.format_of(dtype.as_numpy_dtype)
  return tf.as_dtype(form.dtype)


def exponents(flat: tf.Tensor) -> tf.Tensor:
  """The exponent of each block of a flat tensor."""
  form, length = _format_of(flat.dtype), flat.shape[0]
  find = functools.partial(_exponents, form, 1)
  if 'GPU' in flat.device:
    # TensorFlow takes the maximum of int32 on the host.
    find = functools.partial(_call, _exponents, form, 1)
  tail = 0 if length is None else length % fixed_point.block_length(length)
  if not tail:
    return find(_blocks(flat))
  # Without a copy of all that is in whole blocks.
  block = fixed_point.block_length(length)
  whole = tf.reshape(flat[:-tail], [-1, block])
  return tf.concat([find(whole), find(flat[None, -tail:])], 0)


def encode(
  flats: Sequence[tf.Tensor], exponents_of_all: tf.Tensor, num_terms: int
) -> tf.Tensor:
  """The sum of some terms as integers, with the exponents of all terms."""
  form = _format_of(flats[0].dtype)
  rows = _unless_special(
    *(_encode, _encode_special, form, num_terms, exponents_of_all),
    *map(_blocks, flats),
  )
  return _flat(rows, flats[0])


def decode(
  integers: tf.Tensor,
  exponents_of_all: tf.Tensor,
  num_terms: int,
  dtype: tf.DType,
) -> tf.Tensor:
  """The sum that the sum of all terms' integers stands for."""
  form = _format_of(dtype)
  rows = _unless_special(
    *(_decode, _decode_special, form, num_terms, exponents_of_all),
    _blocks(integers),
  )
  return _flat(rows, integers)


# Of rows that are blocks: XLA makes no fast loops of flat tensors.


def _exponents(form, num_terms, rows):
  del num_terms
  # The largest of positive numbers, or of negative ones, are those of the bits as
  # integers with and without a sign. So no tensor with all magnitudes is made.
  largest = [
    tf.bitcast(tf.reduce_max(tf.bitcast(rows, dtype), 1), form.integer)
    for dtype in (form.integer, f'u{form.integer.name}')
  ]
  magnitudes = [tf.bitwise.bitwise_and(n, form.magnitude) for n in largest]
  return tf.cast(
    tf.bitwise.right_shift(tf.maximum(*magnitudes), form.mantissa_bits),
    form.exponent,
  )


def _encode(form, num_terms, exponents_of_all, *terms):
  shared = _shared(form, exponents_of_all, num_terms)
  scale = _power_of_2(form, form.to_scale(num_terms) - shared)
  return sum(tf.cast(tf.round(rows * scale), form.integer) for rows in terms)


def _encode_special(form, num_terms, exponents_of_all, *terms):
  codes = sum(
    tf.cast(tf.math.is_nan(r) | (r > form.largest), form.integer)
    * fixed_point.ABOVE
    + tf.cast(tf.math.is_nan(r) | (r < -form.largest), form.integer)
    * fixed_point.BELOW
    for r in terms
  )
  is_special = _is_special(form, exponents_of_all)[:, None]
  finite = [tf.where(is_special, tf.zeros([], r.dtype), r) for r in terms]
  integers = _encode(form, num_terms, exponents_of_all, *finite)
  return tf.where(is_special, codes, integers)


def _decode(form, num_terms, exponents_of_all, integers):
  shared = _shared(form, exponents_of_all, num_terms)
  unit = _power_of_2(form, shared + form.to_unit(num_terms))
  return tf.cast(integers, form.dtype) * unit


def _decode_special(form, num_terms, exponents_of_all, integers):
  above = tf.bitwise.bitwise_and(integers, fixed_point.BELOW - 1) > 0
  below = tf.bitwise.right_shift(integers, 16) > 0
  plus, minus, nan = (
    tf.constant(float(name), form.dtype) for name in ('inf', '-inf', 'nan')
  )
  special = tf.where(
    tf.not_equal(above, below), tf.where(above, plus, minus), nan
  )
  is_special = _is_special(form, exponents_of_all)[:, None]
  sums = _decode(form, num_terms, exponents_of_all, integers)
  return tf.where(is_special, special, sums)


def _format_of(dtype: tf.DType) -> fixed_point.Format:
  return fixed_point.format_of(dtype.as_numpy_dtype)


def _is_special(form, exponents_of_all):
  return tf.equal(exponents_of_all, form.special)


def _shared(form, exponents_of_all, num_terms):
  """The exponents in use, one for each row of a block."""
  shared = tf.cast(exponents_of_all, form.integer)
  return tf.maximum(shared, form.least(num_terms))[:, None]


def _power_of_2(form, exponent):
  return tf.bitcast(
    tf.bitwise.left_shift(exponent, form.mantissa_bits), form.dtype
  )


def _blocks(flat):
  """One row for each block, the last of them filled up with zeros."""
  length, block = flat.shape[0], BLOCK_LENGTH
  if length is None:
    flat = tf.pad(flat, [[0, -tf.size(flat) % block]])
  else:
    block = fixed_point.block_length(length)
    if length % block:
      flat = tf.pad(flat, [[0, -length % block]])
  return tf.reshape(flat, [-1, block])


def _flat(rows, like):
  """The values of rows of blocks, as many as `like` has."""
  flat = tf.reshape(rows, [-1])
  if like.shape[0] is None:
    return flat[: tf.size(like)]
  return flat if flat.shape[0] == like.shape[0] else flat[: like.shape[0]]


def _unless_special(compute, compute_any, form, num_terms, shared, *terms):
  """What `compute_any` returns, by `compute` where all terms are finite."""
  if not _is_compiled(terms[0]):
    return compute_any(form, num_terms, shared, *terms)
  return tf.cond(
    tf.reduce_any(_is_special(form, shared)),
    lambda: compute_any(form, num_terms, shared, *terms),
    lambda: _call(compute, form, num_terms, shared, *terms),
  )


def _is_compiled(rows):
  """Returns whether XLA makes one loop of what is computed over all blocks."""
  return (rows.shape.num_elements() or 0) >= _COMPILED


def _call(compute, form, num_terms, *tensors):
  if not _is_compiled(tensors[-1]):
    return compute(form, num_terms, *tensors)
  shape = tuple(tensors[-1].shape)
  compiled = _compiled(compute, form, num_terms, len(tensors), shape)
  return compiled(*tensors)


@functools.lru_cache(maxsize=1024)
def _compiled(compute, form, num_terms, count, shape):
  """One function for each kind of call, which XLA compiles once."""
  del count, shape
  return tf.function(
    functools.partial(compute, form, num_terms),
    autograph=False,
    jit_compile=True,
  )
