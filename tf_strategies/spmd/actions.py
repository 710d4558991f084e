"""Decides where an operation with side effects runs."""

from __future__ import annotations

from tf_strategies.spmd import kinds
from tf_strategies.spmd import plan as plan_lib

# TensorFlow calls these stateful, but each replica may run its own.
_BRANCHES = ('If', 'While', 'Case')
_OWN = {'Assert', *_BRANCHES, *(f'Stateless{name}' for name in _BRANCHES)}


def acts(node) -> bool:
  """Returns whether a node does more than compute and read."""
  return node.is_stateful and node.type not in plan_lib.READS


def runs_at(plan, node, site) -> bool:
  """Returns whether a node that acts does so at a site."""
  if node.type in _OWN:
    return site.replica is not None or site.is_home
  resources = [plan.values[t].resource for t in node.inputs]
  resources = [r for r in resources if r is not None]
  if not resources:
    # An operation with rows runs on all replicas. One whose result only the first
    # replica has runs once.
    found = [plan.values[t].kind for t in node.outputs]
    if found and kinds.FIRST not in found:
      return site.replica is not None or site.is_home
    return site.is_chief
  if any(r.is_single for r in resources):
    return site.is_home
  return site.replica is not None


def is_alike(bodies, sites) -> bool:
  """Returns whether branches and loops do the same at every site."""
  for plan in bodies:
    for node, decision in plan.decisions.items():
      if acts(node) and len({runs_at(plan, node, s) for s in sites}) > 1:
        return False
      if not is_alike(decision.bodies.values(), sites):
        return False
  return True
