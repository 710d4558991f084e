"""Sets of tensor shapes to reduce, by name."""

import re

from tf_strategies import errors

_PATTERN = re.compile(r'(\d+)x(\d+)(KB|MB)')
_BYTES = {'KB': 1000, 'MB': 1000**2}
_FLOAT32_BYTES = 4

RESNET = 'resnet'


def by_name(name: str) -> tuple[tuple[int, ...], ...]:
  """Returns the shapes of a set of float32 tensors.

  Example:

    >>> by_name('2x4KB')
    ((1000,), (1000,))
    >>> len(by_name('resnet'))
    60

  Args:
    name: a count and a size, such as '25x1MB', or 'resnet'.

  Raises:
    UnsupportedOptionError: if `name` is neither.
  """
  if name == RESNET:
    return resnet()
  found = _PATTERN.fullmatch(name)
  if found is None or not int(found[1]) or not int(found[2]):
    raise errors.UnsupportedOptionError(
      f'the tensor set {name!r}',
      "'resnet', or a count and a size in KB or MB",
      "write for instance '25x1MB'",
    )
  size = int(found[2]) * _BYTES[found[3]] // _FLOAT32_BYTES
  return ((size,),) * int(found[1])


def resnet() -> tuple[tuple[int, ...], ...]:
  """Returns 60 shapes of ResNet-50's parameters: 102 MB.

  They are all convolution kernels, the classifier, and five of the 106 vectors of
  the batch normalisations.

  Source: He et al., "Deep residual learning for image recognition", 2015,
  table 1.
  """
  shapes = [(7, 7, 3, 64)]
  channels = 64
  for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
    for block in range(blocks):
      shapes += [
        (1, 1, channels, width),
        (3, 3, width, width),
        (1, 1, width, 4 * width),
      ]
      if block == 0:
        shapes.append((1, 1, channels, 4 * width))
      channels = 4 * width
  shapes += [(channels, 1000), (1000,)]
  shapes += [(size,) for size in (64, 256, 512, 1024, 2048)]
  return tuple(shapes)
