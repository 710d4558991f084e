"""Decides where an operation with side effects runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.spmd import kinds


def runs_at(plan, node, site) -> bool:
  """Returns whether a node that acts does so at a site."""
  if bodies := plan.decisions[node].bodies:
    return any(n.acts and runs_at(p, n, site) for p, n in _inside(bodies))
  resources = plan.resources(node)
  if not resources:
    # An operation with rows runs on all replicas, and each may check its own. One whose
    # result only the first replica has runs once.
    found = [plan.values[t].kind for t in node.outputs]
    if node.type == 'Assert' or (found and kinds.FIRST not in found):
      return site.replica is not None or site.is_home
    return site.is_chief
  if any(r in site.copies for r in resources):
    return True
  if any(r.is_single for r in resources):
    return site.is_home
  return site.replica is not None


def _inside(bodies):
  """Yields the nodes of branches and loops, each with its plan."""
  for plan in bodies.values():
    for node, decision in plan.decisions.items():
      if decision.bodies:
        yield from _inside(decision.bodies)
      else:
        yield plan, node


def copied(bodies, site) -> dict[Any, tf.DType]:
  """Returns the variables of which a site needs copies in branches and loops.

  These variables are read there, and other sites write them: too early for some of the
  reads, or too late for others. The site writes its copies instead.

  Raises:
    UnsupportedOptionError: one of them is a table, which cannot be copied.
  """
  read, written = set(), {}
  for plan, node in _inside(bodies):
    resources = plan.resources(node)
    if not node.acts:
      read.update(resources)
    elif not runs_at(plan, node, site):
      dtype = node.attr('dtype') or node.attr('T')
      written |= dict.fromkeys(resources[:1], dtype)
  found = {r: dtype for r, dtype in written.items() if r in read}
  if None in found.values():
    raise errors.UnsupportedOptionError(
      'a branch or loop that both reads and writes a table',
      'one that reads the table, or writes it',
      'look up before the branch or loop, or insert after it',
    )
  return found


def is_alike(bodies, sites) -> bool:
  """Returns whether branches and loops do the same at every site."""
  return all(
    len({runs_at(plan, node, site) for site in sites}) == 1
    for plan, node in _inside(bodies)
    if node.acts
  )
