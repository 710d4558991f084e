"""A traced function as a flat list of operations, with calls expanded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal

# Attribute of the identities through which gradients reach an optimizer. It holds the
# name of the variable, and the number of shards.
GRADIENT = '_tfs_gradient'

# Operations that read a variable, or other state, and change nothing.
_READS = frozenset(
  {
    'LookupTableFindV2',
    'LookupTableSizeV2',
    'ReadVariableOp',
    'ResourceGather',
    'ResourceGatherNd',
    'VarIsInitializedOp',
    'VariableShape',
  }
)
_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
# Attributes that say where an operation runs or how it was built.
_DROPPED = ('_class', '_output_shapes', '_XlaHasReferenceVars')


@dataclasses.dataclass(eq=False)
class Tensor:
  """One output of a node."""

  node: Node
  dtype: tf.DType
  shape: tf.TensorShape


@dataclasses.dataclass(eq=False)
class Node:
  """An operation: its type, its inputs, and the nodes that must run before it."""

  type: str
  name: str
  inputs: list[Tensor]
  before: list[Node]
  attrs: dict[str, Any]
  op: Any
  # The functions that it calls and that have no program.
  opaque: list
  outputs: list[Tensor] = dataclasses.field(default_factory=list)
  bodies: dict[str, Program] = dataclasses.field(default_factory=dict)

  @property
  def gradient(self) -> tuple[str, int] | None:
    """The name of the variable whose gradient it hands on, and the shards."""
    attr = self.attrs.get(GRADIENT)
    return attr and (attr.list.s[0].decode(), attr.list.i[0])

  @functools.cached_property
  def is_stateful(self) -> bool:
    """Returns whether it has effects besides its outputs."""
    return self.op is not None and self.op.op_def.is_stateful

  @property
  def acts(self) -> bool:
    """Returns whether it does more than compute and read."""
    return self.is_stateful and self.type not in _READS

  def is_all_of(self, types: frozenset[str]) -> bool:
    """Returns whether the node and its bodies have these types and no strings."""
    return (
      self.type in types
      and all(t.dtype != tf.string for t in [*self.inputs, *self.outputs])
      and all(
        node.is_all_of(types)
        for body in self.bodies.values()
        for node in body.nodes
        if node.type != '_Argument'
      )
    )

  def attr(self, name: str):
    """Returns the value of an attribute, or None."""
    try:
      return self.op.get_attr(name)
    except ValueError:
      return None


@dataclasses.dataclass(eq=False)
class Program:
  """Nodes in an order in which they can run."""

  nodes: list[Node]
  inputs: list[Tensor]
  outputs: list[Tensor]


def flatten(graph, inputs, outputs, root=None) -> Program:
  """Returns the program that a graph computes, from `inputs` to `outputs`.

  `root` is the outermost graph, which has all functions.
  """
  root = graph if root is None else root
  nodes: list[Node] = []
  found: dict[Any, Node] = {}

  def add(node, outputs):
    node.outputs = [Tensor(node, t.dtype, t.shape) for t in outputs]
    nodes.append(node)
    return node

  def expand(graph, tensors, before):
    """Adds the operations of `graph`. `tensors` maps the id of a tensor to ours."""
    nodes_of = {}
    for op in _sorted(graph.get_operations()):
      if op.outputs and id(op.outputs[0]) in tensors:
        nodes_of[op.name] = []
        continue
      controls = list(before) if op.op_def.is_stateful else []
      for control in op.control_inputs:
        controls += nodes_of.get(control.name, [])
      inputs = [tensors[id(t)] for t in op.inputs]
      attrs = {
        name: value
        for name, value in op.node_def.attr.items()
        if name not in _DROPPED
      }
      bodies, opaque = _tf_internal.functions_of(root, op, attrs)
      if op.type in _CALLS:
        first, body = len(nodes), bodies['f']
        inner = dict(zip(map(id, body.inputs), inputs, strict=True))
        expand(body, inner, controls)
        # A graph may have more outputs than the call: derivatives use them.
        for tensor, result in zip(op.outputs, body.outputs, strict=False):
          tensors[id(tensor)] = inner[id(result)]
        nodes_of[op.name] = [n for n in nodes[first:] if n.is_stateful]
        continue
      key = _key(op, inputs, controls, attrs)
      node = found.get(key)
      if node is None:
        node = Node(op.type, op.name, inputs, controls, attrs, op, opaque)
        add(node, op.outputs)
        if not opaque:
          node.bodies = {
            name: flatten(body, body.inputs, body.outputs, root)
            for name, body in bodies.items()
          }
        if key is not None:
          found[key] = node
      nodes_of[op.name] = [node, *controls] if op.type == 'NoOp' else [node]
      for tensor, ours in zip(op.outputs, node.outputs, strict=True):
        tensors[id(tensor)] = ours

  arguments = [
    add(Node('_Argument', t.op.name, [], [], {}, None, []), [t]).outputs[0]
    for t in inputs
  ]
  tensors = dict(zip(map(id, inputs), arguments, strict=True))
  expand(graph, tensors, ())
  return Program(nodes, arguments, [tensors[id(t)] for t in outputs])


def _key(op, inputs, controls, attrs) -> Any:
  """Returns a key that operations with equal results share, or None if it has no twin.

  Optimizers read the learning rate and the step, and compute with them, once for each
  variable. Reads of a variable with no write between them wait for the same nodes.
  """
  if (op.op_def.is_stateful and op.type != 'ReadVariableOp') or any(
    t.dtype in (tf.variant, tf.resource) for t in op.outputs
  ):
    return None
  return (
    op.type,
    tuple(inputs),
    frozenset(controls),
    frozenset(
      (name, value.SerializeToString(deterministic=True))
      for name, value in attrs.items()
    ),
  )


def _sorted(ops) -> list:
  """Returns operations in an order in which they can run, close to theirs.

  A gradient adds inputs to a loop that was built before them.
  """
  ordered = {}

  def visit(op):
    if op not in ordered:
      for before in (*(t.op for t in op.inputs), *op.control_inputs):
        visit(before)
      ordered[op] = None

  for op in ops:
    visit(op)
  return list(ordered)
