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
  form = _format_of(flat.dtype)
  if 'GPU' in flat.device:
    # TensorFlow takes the maximum of int32 on the host.
    return _call(_exponents, form, 1, flat)
  return _exponents(form, 1, flat)


def encode(
  flats: Sequence[tf.Tensor], exponents_of_all: tf.Tensor, num_terms: int
) -> tf.Tensor:
  """The sum of some terms as integers, with the exponents of all terms."""
  form = _format_of(flats[0].dtype)
  return _unless_special(
    _encode, _encode_special, form, num_terms, exponents_of_all, *flats
  )


def decode(
  integers: tf.Tensor,
  exponents_of_all: tf.Tensor,
  num_terms: int,
  dtype: tf.DType,
) -> tf.Tensor:
  """The sum that the sum of all terms' integers stands for."""
  form = _format_of(dtype)
  return _unless_special(
    _decode, _decode_special, form, num_terms, exponents_of_all, integers
  )


def _exponents(form, num_terms, flat):
  del num_terms
  length = flat.shape[0]
  if length is None or length % BLOCK_LENGTH == 0:
    return _exponents_of_rows(form, _blocks(flat))
  # Without a copy of all that is in whole blocks.
  whole = length - length % BLOCK_LENGTH
  parts = [
    _exponents_of_rows(form, _blocks(flat[:whole])),
    _exponents_of_rows(form, flat[None, whole:]),
  ]
  return tf.concat(parts, 0)


def _exponents_of_rows(form, rows):
  bits = tf.bitcast(rows, form.integer)
  largest = tf.reduce_max(tf.bitwise.bitwise_and(bits, form.magnitude), 1)
  return tf.cast(
    tf.bitwise.right_shift(largest, form.mantissa_bits), form.exponent
  )


def _encode(form, num_terms, exponents_of_all, *flats):
  shared = _shared(form, exponents_of_all, num_terms)
  scale = _power_of_2(form, form.to_scale(num_terms) - shared)
  total = sum(
    tf.cast(tf.round(_blocks(flat) * scale), form.integer) for flat in flats
  )
  return _flat(total, flats[0])


def _encode_special(form, num_terms, exponents_of_all, *flats):
  rows = [_blocks(flat) for flat in flats]
  codes = sum(
    tf.cast(tf.math.is_nan(r) | (r > form.largest), form.integer)
    * fixed_point.ABOVE
    + tf.cast(tf.math.is_nan(r) | (r < -form.largest), form.integer)
    * fixed_point.BELOW
    for r in rows
  )
  is_special = _is_special(form, exponents_of_all)[:, None]
  finite = [
    _flat(tf.where(is_special, tf.zeros([], r.dtype), r), flats[0])
    for r in rows
  ]
  integers = _blocks(_encode(form, num_terms, exponents_of_all, *finite))
  return _flat(tf.where(is_special, codes, integers), flats[0])


def _decode(form, num_terms, exponents_of_all, integers):
  shared = _shared(form, exponents_of_all, num_terms)
  unit = _power_of_2(form, shared + form.to_unit(num_terms))
  return _flat(tf.cast(_blocks(integers), form.dtype) * unit, integers)


def _decode_special(form, num_terms, exponents_of_all, integers):
  rows = _blocks(integers)
  above = tf.bitwise.bitwise_and(rows, fixed_point.BELOW - 1) > 0
  below = tf.bitwise.right_shift(rows, 16) > 0
  plus, minus, nan = (
    tf.constant(float(name), form.dtype) for name in ('inf', '-inf', 'nan')
  )
  special = tf.where(
    tf.not_equal(above, below), tf.where(above, plus, minus), nan
  )
  is_special = _is_special(form, exponents_of_all)[:, None]
  sums = _blocks(_decode(form, num_terms, exponents_of_all, integers))
  return _flat(tf.where(is_special, special, sums), integers)


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
  length = flat.shape[0]
  if length is None:
    flat = tf.pad(flat, [[0, -tf.size(flat) % BLOCK_LENGTH]])
  elif length % BLOCK_LENGTH:
    flat = tf.pad(flat, [[0, -length % BLOCK_LENGTH]])
  return tf.reshape(flat, [-1, BLOCK_LENGTH])


def _flat(rows, like):
  """The values of rows of blocks, as many as `like` has."""
  flat = tf.reshape(rows, [-1])
  if like.shape[0] is None:
    return flat[: tf.size(like)]
  return flat if flat.shape[0] == like.shape[0] else flat[: like.shape[0]]


def _unless_special(compute, compute_any, form, num_terms, shared, *tensors):
  """What `compute_any` returns, by `compute` where all terms are finite."""
  if not _is_compiled(tensors[0]):
    return compute_any(form, num_terms, shared, *tensors)
  return tf.cond(
    tf.reduce_any(_is_special(form, shared)),
    lambda: compute_any(form, num_terms, shared, *tensors),
    lambda: _call(compute, form, num_terms, shared, *tensors),
  )


def _is_compiled(flat):
  """Whether XLA makes one loop of what is computed over a tensor."""
  return flat.shape[0] is not None and flat.shape[0] >= _COMPILED


def _call(compute, form, num_terms, *tensors):
  if not _is_compiled(tensors[-1]):
    return compute(form, num_terms, *tensors)
  length = tensors[-1].shape[0]
  compiled = _compiled(compute, form, num_terms, len(tensors), length)
  return compiled(*tensors)


@functools.lru_cache(maxsize=1024)
def _compiled(compute, form, num_terms, count, length):
  """One function for each kind of call, which XLA compiles once."""
  del count, length
  return tf.function(
    functools.partial(compute, form, num_terms),
    autograph=False,
    jit_compile=True,
  )
