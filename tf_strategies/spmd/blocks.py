"""What is built together of a program."""

from __future__ import annotations

import dataclasses

from tf_strategies.spmd.program import Node
from tf_strategies.spmd.site import Site


@dataclasses.dataclass(eq=False)
class Block:
  """Nodes that are built together: between two meetings, for the same sites.

  Attributes:
    level: the number of meetings before.
    turn: the number of other blocks of this level that have to run before.
    key: the sites, and whether the nodes are deferred, the same at every site,
      and compiled by XLA.
    nodes: in an order in which they can run.
  """

  level: int
  turn: int
  key: tuple[tuple[Site, ...], bool, bool, bool]
  nodes: list[Node] = dataclasses.field(default_factory=list)

  @property
  def sites(self):
    """Where it is built."""
    return self.key[0]

  @property
  def is_deferred(self):
    """Whether it waits for every meeting."""
    return self.key[1]

  @property
  def is_shared(self):
    """Whether it is the same at each of its sites."""
    return self.key[2]

  @property
  def is_compiled(self):
    """Whether XLA compiles it."""
    return self.key[3]
