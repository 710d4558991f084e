"""What a variable, or another object, of a program is to those that build it."""

from __future__ import annotations

from typing import Protocol

import tensorflow as tf

from tf_strategies.spmd.kinds import Shard
from tf_strategies.spmd.site import Site


class Resource(Protocol):
  """What a handle in a program stands for.

  Attributes:
    is_part: whether each replica holds a part of a sum.
    is_single: whether there is one, which is written at home only.
    shard: what a replica has of it, None for all.
    name: for messages.
  """

  is_part: bool
  is_single: bool
  shard: Shard | None
  name: str

  def handle(self, site: Site) -> tf.Tensor:
    """The handle that a site uses."""
