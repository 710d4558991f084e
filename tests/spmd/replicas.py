"""Runs a function as the replicas of one graph, which share a batch's rows."""

import numpy as np
import tensorflow as tf

from tests import virtual_devices
from tf_strategies import _tf_internal
from tf_strategies.spmd import emit, kinds, pieces, plan, program, rules, site

_ = rules  # The import registers the rules.


class _Exchange(emit.Exchange):
  """Exchanges values between the replicas of one graph, and records each exchange."""

  def __init__(self):
    self.exchanges = []

  def add(self, columns, sites, gradients):
    self.exchanges.append('add')
    sums = [tf.add_n(row) for row in zip(*columns, strict=True)]
    return [sums for _ in sites]

  def scatter(self, columns, shard, sites, are_gradients):
    raise NotImplementedError  # No program has gradients of pieces.

  def join(self, columns, shapes, sites):
    self.exchanges.append('join')
    joined = [
      pieces.joined(tf.stack(row), shape)
      for row, shape in zip(zip(*columns, strict=True), shapes, strict=True)
    ]
    return [joined for _ in sites]

  def gather(self, values, axis, sites):
    self.exchanges.append('gather')
    return [tf.concat(values, axis) for _ in sites]

  def first(self, value, like, sites):
    return [value for _ in sites]


def flat(structure):
  """Returns the tensors of a structure, including the parts of sparse gradients."""
  return tf.nest.flatten(structure, expand_composites=True)


def run(function, arrays, rows, resources=()):
  """Runs `function(*arrays, *variables)` on replicas.

  Args:
    function: a program for one device.
    arrays: the batch; scalars are equal on all replicas.
    rows: number of rows of each replica.
    resources: the program's variables, each with an attribute `variable`.

  Returns:
    The results, and the kind of each exchange.
  """
  exchange = _Exchange()
  known = {id(r.variable.handle): r for r in resources}

  @tf.function(autograph=False)
  def compute(*tensors):
    specs = [
      tf.TensorSpec([None, *t.shape[1:]] if t.shape.rank else [], t.dtype)
      for t in tensors
    ]
    graph = _tf_internal.trace(
      'case',
      lambda args: function(*args, *(r.variable for r in resources)),
      [specs],
    )
    traced = program.flatten(
      graph, graph.inputs, flat(graph.structured_outputs)
    )
    sites = _sites(rows)
    values = []
    given = [*tensors, *(external for external, _ in graph.captures)]
    for tensor, value in zip(traced.inputs, given, strict=True):
      kind = kinds.WHOLE
      if len(values) < len(tensors) and value.shape.rank:
        kind = kinds.Split(0)
      resource = known.get(id(value))
      dims = None if resource is None else ()
      values.append(kinds.Value(kind, dims, resource=resource))
      for s in sites:
        own = value if resource is None else resource.handle(s)
        if kind != kinds.WHOLE:
          own = s.rows_of(value, kind)
        s.tensors[tensor, kinds.AS_IS] = own
    planned = plan.make(traced, values)
    wanted = [(t, kinds.WHOLE) for t in traced.outputs]
    [results] = emit.Emitter(planned, sites, exchange).run(wanted, sites[:1])
    return results

  results = compute(*[tf.constant(a) for a in arrays])
  return [r.numpy() for r in results], exchange.exchanges


def _sites(rows):
  starts = np.cumsum([0, *rows[:-1]])
  return [
    site.Site(
      virtual_devices.name(i),
      site.ReplicaRows(
        tf.constant(max(n, 1)),
        tf.constant(min(int(start), sum(rows) - 1)),
        tf.constant(sum(rows)),
        tf.constant(n),
        n > 0 and start == 0,
        i,
      ),
      i,
      i == 0,
      i == 0,
    )
    for i, (n, start) in enumerate(zip(rows, starts, strict=True))
  ]
