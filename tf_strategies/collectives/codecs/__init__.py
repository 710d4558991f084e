"""Codecs by name, one file each.

Every module here defines one subclass of `codec.Codec`, whose `name` is the
name of its file. `compression=` knows those in the table `CODECS`.

Example:

  >>> get('bfloat16').payload_bytes(10)
  20
"""

from __future__ import annotations

import types
from collections.abc import Mapping

import numpy as np

from tf_strategies import option_checks
from tf_strategies.collectives import codec as codec_lib
from tf_strategies.collectives.codecs import bfloat16, float16, none

# Number of elements for which the sizes of payloads are compared.
_MANY = 1 << 16


NONE = none.NoCompression()
CODECS: Mapping[str, codec_lib.Codec] = types.MappingProxyType(
  {
    codec.name: codec
    for codec in (bfloat16.BFloat16(), float16.Float16(), NONE)
  }
)
"""The codecs, by the names that `compression=` takes."""


def get(name: str) -> codec_lib.Codec:
  """Returns the codec of a name.

  Raises:
    UnsupportedOptionError: there is no codec of that name.
  """
  option_checks.check_choice(
    'compression',
    name,
    CODECS,
    "write compression='none' to send arrays as they are",
  )
  return CODECS[name]


def for_array(name: str, dtype: np.dtype) -> codec_lib.Codec:
  """Returns the codec in which arrays of a dtype travel when `name` is asked for.

  A codec applies to floats if its payload is smaller than the array. All other arrays
  travel unchanged. 16-bit floats are payloads already: they are added in float32 and
  rounded once a hop.

  Example:

    >>> [for_array('float16', np.dtype(d)).name for d in ('f4', 'f2', 'i4')]
    ['float16', 'float16', 'none']
    >>> for_array('none', np.dtype('f2')).name
    'float16'

  Raises:
    UnsupportedOptionError: there is no codec of that name.
  """
  wanted = get(name)
  own = NONE
  for codec in CODECS.values():
    if codec.cast_dtype == dtype.name and dtype.isnative:
      own = codec
  is_float = own is not NONE or dtype.kind == 'f'
  is_smaller = wanted.payload_bytes(_MANY) < _MANY * dtype.itemsize
  return wanted if is_float and is_smaller and wanted is not NONE else own
