"""Builds the operations of a planned program, for every replica of a process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.spmd import actions, kinds, pieces
from tf_strategies.spmd.exchange import Exchange
from tf_strategies.spmd.kinds import AS_IS, WHOLE, Shard, Split
from tf_strategies.spmd.plan import Plan, is_sum
from tf_strategies.spmd.program import Node, Tensor
from tf_strategies.spmd.site import ReplicaRows, Site, at_each, set_own_shape

# A block of at least this many nodes is built faster as one function for all sites.
_MANY_NODES = 500
# On CPUs, a function of at least this many nodes is called, not inlined in the graph.
# The step then starts faster, and each call takes a little longer.
_MOST_INLINED = 2000
# Except with these operations: TensorFlow uses their oneDNN kernels only inlined.
_REWRITTEN = 'Conv', 'MatMul'


class _Block(NamedTuple):
  """Where and how nodes are built together.

  `level` counts the meetings before the block. `turn` is its index among the blocks of
  that level. A deferred block runs after the last meeting. A block that `is_alike`
  can be one function, which each of its sites calls.
  """

  level: int
  turn: int
  sites: tuple[Site, ...]
  is_deferred: bool
  is_alike: bool
  is_compiled: bool


class Emitter:
  """Builds a planned program at several sites, which meet in `exchange`."""

  def __init__(
    self,
    plan: Plan,
    sites: Sequence[Site],
    exchange: Exchange | None,
    compiled: frozenset[str] = frozenset(),
  ):
    self._plan = plan
    self._sites = list(sites)
    self._exchange, self._compiled = exchange, compiled
    # Results of meetings.
    self.met: list[tf.Tensor] = []
    # In a branch or loop there is one site, which need not be a replica.
    is_alone = exchange is None
    self._replicas = [s for s in sites if is_alone or s.replica is not None]
    for site in sites:
      if site not in self._replicas:
        # A home device has no rows. The first replica has the tensors it did not build.
        site.tensors.maps += self._replicas[0].tensors.maps

  def run(
    self,
    outputs: Sequence[tuple[Tensor, Any]],
    sites: Sequence[Site],
  ) -> list[list[tf.Tensor]]:
    """Builds all that `outputs` need, which are pairs of a tensor and a kind.

    Returns a list of outputs for each of `sites`.
    """
    needed, pending = self._needs(outputs, sites)
    blocks = self._blocks(needed)
    # The nodes that use each tensor; None stands for outputs and meetings.
    users: dict[Tensor, set[Node | None]] = {
      tensor: {None} for tensor in (*(t for t, _ in outputs), *pending)
    }
    for node in needed:
      for tensor in node.inputs:
        users.setdefault(tensor, set()).add(node)
    met = 0
    for block, nodes in blocks:
      while met < block.level:
        self._meet(pending, met)
        met += 1
      with tf.control_dependencies(
        self._barrier() if block.is_deferred else []
      ):
        is_large = len(block.sites) > 1 and len(nodes) >= _MANY_NODES
        if block.is_compiled or (block.is_alike and is_large):
          self._call(block, nodes, users)
        else:
          self._build(nodes, block.sites)
    while pending:
      self._meet(pending, met)
      met += 1
    return [[self._in_kind(site, *pair) for pair in outputs] for site in sites]

  def _barrier(self) -> list[tf.Operation]:
    """Returns an operation that waits for all meetings so far.

    Results of meetings as inputs do not suffice: TensorFlow starts a branch before
    its inputs are ready, and runs the operations that do not need them.
    """
    with tf.control_dependencies(self.met):
      return [tf.no_op()]

  # Nodes and meetings to build, by site.

  def _needs(self, outputs, output_sites):
    """Returns the nodes and the tensors of meetings to build, with their sites."""
    plan = self._plan
    nodes: dict[Node, set[Site]] = {}
    meetings: dict[Tensor, set[Site]] = {}
    # Nodes whose outputs are used, with the sites that use them.
    asked: set[tuple[Node, Site]] = set()

    def ask(tensor, wanted, site):
      if plan.is_computed(tensor, wanted):
        return
      sites = [site]
      if plan.meets(tensor, wanted):
        meetings.setdefault(tensor, set()).add(site)
        sites = self._replicas
      asked.update((tensor.node, ask_node(tensor.node, s)) for s in sites)

    def ask_node(node, site):
      acts_here = node.acts and actions.runs_at(plan, node, site)
      is_replica = site in self._replicas
      if not (is_replica or acts_here or self._is_whole(node)):
        site = self._replicas[0]
      if node.type != '_Argument':
        nodes.setdefault(node, set()).add(site)
        if plan.decisions[node].emit_together:
          nodes[node].update(self._replicas)
      return site

    for node in plan.program.nodes:
      if node.acts:
        # If another process runs it, this one takes part in the meetings before it.
        at = [s for s in self._sites if actions.runs_at(plan, node, s)]
        for site in at or self._replicas[:1]:
          ask_node(node, site)
    for tensor, kind in outputs:
      for site in output_sites:
        ask(tensor, kind, site)
    for node in reversed(plan.program.nodes):
      if node not in nodes:
        continue
      decision = plan.decisions[node]
      for site in list(nodes[node]):
        # A branch or loop may also run for its outputs.
        has_outputs = decision.bodies and (node, site) in asked
        if node.acts and not (has_outputs or actions.runs_at(plan, node, site)):
          nodes[node].discard(site)
        for tensor, wanted in plan.wanted(node):
          ask(tensor, wanted, site)
    return nodes, meetings

  def _is_whole(self, node) -> bool:
    """Returns whether inputs and outputs are whole, so that a home may run it."""
    plan = self._plan
    if node not in plan.decisions:
      return True
    return all(plan.values[t].kind == WHOLE for t in node.outputs) and all(
      plan.seen(t).kind == WHOLE or want == WHOLE
      for t, want in plan.wanted(node)
    )

  # Building.

  def _blocks(self, needed) -> list[tuple[_Block, list[Node]]]:
    """Returns blocks in an order in which they can run, as few as possible."""
    plan = self._plan
    blocks: dict[_Block, list[Node]] = {}
    # Blocks of the nodes to build; of others, the built nodes before them.
    places: dict[Node, _Block] = {}
    orders: dict[Node, set[Node]] = {}
    for node in plan.program.nodes:
      before = {
        n for b in node.before for n in ([b] if b in places else orders[b])
      }
      if node not in needed or node.type == 'Const':
        orders[node] = before
        continue
      before |= {
        t.node
        for t, wanted in plan.wanted(node)
        if t.node in places and not plan.is_computed(t, wanted)
      }
      sites = tuple(s for s in self._sites if s in needed[node])
      is_alike = self._is_alike(node, sites)
      is_compiled = is_alike and self._is_compiled(node, sites)
      how = sites, node in plan.deferred, is_alike, is_compiled
      level, turn = plan.levels[node], 0
      for block in (places[n] for n in before):
        if block.level == level:
          turn = max(turn, block.turn + (block[2:] != how))
      places[node] = _Block(level, turn, *how)
      blocks.setdefault(places[node], []).append(node)
    return sorted(blocks.items(), key=lambda item: item[0][:2])

  def _is_alike(self, node, sites) -> bool:
    """Returns whether sites build a node each for itself, and in the same way."""
    decision = self._plan.decisions[node]
    return not decision.emit_together and actions.is_alike(
      decision.bodies, sites
    )

  def _is_compiled(self, node, sites) -> bool:
    """Returns whether XLA compiles a node and the functions that it calls.

    A program of XLA reaches only variables of its own device, so a node that uses a
    variable without a copy there is not compiled.
    """
    # A site that is no replica reads the copies of the first one.
    is_apart = any(site.replica is None for site in sites)
    return node.is_all_of(self._compiled) and not any(
      r.is_single or is_apart for r in self._plan.resources(node)
    )

  def _call(self, block, nodes, users):
    """Builds a block as a function, and calls it at each of its sites.

    All that differs between sites are arguments: tensors, handles and numbers of rows.
    """
    plan, sites = self._plan, block.sites
    built = set(nodes)
    used = [
      (tensor, wanted)
      for node in nodes
      for tensor, wanted in plan.wanted(node)
      if tensor.node not in built
      and tensor.node.type != 'Const'
      and not plan.is_computed(tensor, wanted)
    ]
    given = list(dict.fromkeys(used))
    results = [
      tensor
      for node in nodes
      for tensor in node.outputs
      if users.get(tensor, set()) - built
    ]
    fields = [
      field.name
      for field in dataclasses.fields(ReplicaRows)
      if len({id(getattr(site.rows, field.name)) for site in sites}) > 1
    ]

    def compute(rows, tensors):
      inner = sites[0].in_function(rows)
      inner.tensors.update(zip(given, tensors, strict=True))
      self._build(nodes, [inner])
      return [inner.get(tensor) for tensor in results]

    is_apart = (
      len(nodes) >= _MOST_INLINED
      and not block.is_compiled
      and all('CPU' in site.device for site in sites)
      and not any(name in n.type for n in nodes for name in _REWRITTEN)
    )
    calls = at_each(
      sites,
      lambda site: (
        {f: tf.convert_to_tensor(getattr(site.rows, f)) for f in fields},
        [self._in_kind(site, *pair) for pair in given],
      ),
    )
    with tf.device(None):
      function = tf.function(
        compute,
        autograph=False,
        jit_compile=block.is_compiled or None,
        experimental_attributes={'_noinline': True} if is_apart else None,
      ).get_concrete_function(*tf.nest.map_structure(_common_spec, *calls))
    for site, call in zip(sites, calls, strict=True):
      with tf.device(site.device):
        outputs = function(*call)
      _hold(plan, site, results, outputs)

  def _build(self, nodes, sites):
    """Builds nodes: at one site after the other, or at all sites together."""
    plan = self._plan
    for node, found in itertools.groupby(nodes, self._together):
      at, group = sites, list(found)
      build_together = node and plan.decisions[node].emit_together
      if build_together:
        rows = at_each(sites, functools.partial(self._inputs, node))
        with tf.device(None):
          columns = build_together(sites, rows, self._exchange)
        # One without outputs gives a tensor too, to wait for.
        self.met += itertools.chain(*columns)
        for site, outputs in zip(sites, columns, strict=True):
          _hold(plan, site, node.outputs, outputs)
        continue
      if node:  # All copies are made before a site writes.
        at = [self._with_copies(node, site) for site in sites]
      for site in at:
        with tf.device(site.device):
          for each in group:
            self._build_here(each, site)

  def _with_copies(self, node, site) -> Site:
    """Returns a site with the copies that it writes in a branch or loop."""
    dtypes = actions.copied(self._plan.decisions[node].bodies, site)
    copies = {}
    with tf.device(site.device):
      for tensor in node.inputs:
        resource = self._plan.values[tensor].resource
        if resource in dtypes:
          handle = self._in_kind(site, tensor, WHOLE)
          value = tf.raw_ops.ReadVariableOp(
            resource=handle, dtype=dtypes[resource]
          )
          copies[resource] = _tf_internal.temporary_variable(value)
    return site.with_copies(copies)

  def _together(self, node) -> Node | None:
    """Returns a node that sites build together, or None for all others."""
    decision = self._plan.decisions[node]
    return node if decision.emit_together or decision.bodies else None

  def _inputs(self, node, site):
    return [self._in_kind(site, *pair) for pair in self._plan.wanted(node)]

  def _build_here(self, node, site):
    emit = self._plan.decisions[node].emit
    inputs = self._inputs(node, site)
    outputs = emit(site, inputs) if emit else site.op(node, inputs)
    _hold(self._plan, site, node.outputs, outputs)

  def _contributions(self, site, tensors):
    """Returns a replica's terms of sums. A padding row contributes nothing."""
    terms = {t: site.get(t) for t in tensors}
    of_rows = [t for t in tensors if self._plan.values[t].kind == kinds.SUM]
    found = site.contributions([terms[t] for t in of_rows])
    terms.update(zip(of_rows, found, strict=True))
    return list(terms.values())

  def _in_kind(self, site, tensor, wanted):
    """Returns a tensor at a site in the wanted kind, after the meetings."""
    plan = self._plan
    seen = plan.seen(tensor)
    if seen.resource in site.copies:
      return site.copies[seen.resource]
    if plan.is_computed(tensor, wanted):
      return site.lengths(seen.lengths, tensor.dtype, tensor.shape.rank)
    if tensor.node.type == 'Const' and (tensor, AS_IS) not in site.tensors:
      # Where it is used: it is smaller than what would hand it over.
      with tf.device(site.device):
        self._build_here(tensor.node, site)
    return site.as_kind(tensor, plan.values[tensor].kind, seen.kind, wanted)

  def _meet(self, pending, level):
    """Lets replicas meet once for all tensors that are ready at this level."""
    plan, exchange = self._plan, self._exchange
    # In the order of the program, which is the same on all workers.
    ready = [
      tensor
      for node in plan.program.nodes
      for tensor in node.outputs
      if tensor in pending and plan.levels[node] <= level
    ]
    # Tensors that travel together, and those that travel alone.
    scattered: dict[tuple, list[Tensor]] = {}
    added: dict[tuple, list[Tensor]] = {}
    joined, others = [], []
    for tensor in ready:
      kind, forced = plan.values[tensor].kind, plan.forced.get(tensor)
      asking = pending.pop(tensor)
      sites = tuple(s for s in self._sites if s in asking)
      if isinstance(kind, Shard):
        joined.append(tensor)
      elif not is_sum(kind):
        others.append((tensor, kind, sites))
      elif isinstance(forced, Shard):
        is_gradient = tensor.node.gradient is not None
        scattered.setdefault((is_gradient, forced), []).append(tensor)
      else:
        added.setdefault(sites, []).append(tensor)
    for (are_gradients, shard), tensors in scattered.items():
      # Scatter first. Otherwise the first buckets wait for small tensors that are late.
      sites = self._replicas
      columns = [self._contributions(s, tensors) for s in sites]
      results = exchange.scatter(columns, shard, sites, are_gradients)
      self._take(tensors, shard, sites, results)
    for sites, tensors in added.items():
      columns = [self._contributions(s, tensors) for s in self._replicas]
      names = [t.node.gradient and t.node.gradient[0] for t in tensors]
      self._take(tensors, WHOLE, sites, exchange.add(columns, sites, names))
    if joined:
      columns = [[s.get(t) for t in joined] for s in self._replicas]
      shapes = [plan.values[t].static_shape for t in joined]
      results = exchange.join(columns, shapes, self._sites)
      self._take(joined, WHOLE, self._sites, results)
    for tensor, kind, sites in others:
      if isinstance(kind, Split):
        values = [s.real_rows(s.get(tensor), kind.axis) for s in self._replicas]
        results = exchange.gather(values, kind.axis, sites)
      elif kind.op == 'first':
        # The home site, if there is one, has run it itself.
        found = [s for s in self._sites if s.is_chief or s.replica is None]
        values = [s.get(tensor) for s in found if (tensor, AS_IS) in s.tensors]
        value = values[0] if values else None
        results = exchange.first(value, tensor, sites)
      else:
        results = self._reduce(tensor, kind, sites)
      self._take([tensor], WHOLE, sites, [[each] for each in results])

  def _take(self, tensors, kind, sites, results):
    """Stores the results of a meeting."""
    for site, column in zip(sites, results, strict=True):
      self.met += column
      for tensor, result in zip(tensors, column, strict=True):
        site.tensors[tensor, kind] = result

  def _reduce(self, tensor, kind, sites):
    def own(site):
      value = site.get(tensor)[None]
      return value if kind.is_held else site.real_rows(value)

    values = at_each(self._replicas, own)
    gathered = self._exchange.gather(values, 0, sites)
    return at_each(
      sites, lambda _, value: pieces.REDUCE[kind.op](value, 0), gathered
    )


def _hold(plan, site, tensors, built):
  """Stores the tensors that were built at a site. `built` may have more of them."""
  for tensor, each in zip(tensors, built, strict=False):
    set_own_shape(each, tensor, plan.values[tensor])
    site.tensors[tensor, AS_IS] = each


def _common_spec(tensor: tf.Tensor, *others: tf.Tensor) -> tf.TensorSpec:
  """Returns a spec of tensors whose static shapes may differ.

  A handle stands for itself. The function then knows the shape of its variable.
  """
  if tensor.dtype in (tf.resource, tf.variant):
    return tensor
  shape = tensor.shape
  for other in others:
    shape = shape.most_specific_compatible_shape(other.shape)
  return tf.TensorSpec(shape, tensor.dtype)


def run_body(
  plan: Plan,
  sites: Sequence[Site],
  arguments: Sequence[Sequence[tf.Tensor]],
  kinds_of: Sequence[Any],
  exchange: Exchange | None = None,
) -> list[list[tf.Tensor]]:
  """Builds a branch or body at sites, which may meet in `exchange` if it is given.

  Returns the outputs of each site in the given kinds.
  """
  inner = [site.inner() for site in sites]
  for site, row in zip(inner, arguments, strict=True):
    _hold(plan, site, plan.program.inputs, row)
  wanted = list(zip(plan.program.outputs, kinds_of, strict=True))
  return Emitter(plan, inner, exchange).run(wanted, inner)
