"""Reads a traced program for TPU replicas and executes it in lock-step.

TPUStrategy.run puts one program into the graph, and all replicas run it.
`Program` cuts it at its collective ops. XLA compiles the parts between them,
which run once for each replica. NumPy executes the collectives; permutes use
the pairs in the graph.
"""

import numpy as np
import tensorflow as tf

# Attributes that place ops on a TPU.
_TPU_ATTRIBUTES = ('_tpu_replicate', '_replication_info', '_xla_compile_device')
_COLLECTIVES = ('CollectivePermute', 'CrossReplicaSum', 'AllToAll')


class Program:
  """The program of one replica, in a graph that was traced for all replicas.

  Args:
    strategy: a TPU strategy.
    fn: function that each replica runs.
    args: arrays; each replica gets its row of every array.
  """

  def __init__(self, strategy, fn, args):
    @tf.function
    def step():
      per_replica = [
        strategy.experimental_distribute_values_from_function(
          lambda context, a=a: tf.constant(a[context.replica_id_in_sync_group])
        )
        for a in args
      ]
      return strategy.run(fn, per_replica)

    self._graph = step.get_concrete_function().graph
    ops = self._graph.get_operations()
    self.permutes = [op for op in ops if op.type == 'CollectivePermute']
    self.sums = [op for op in ops if op.type == 'CrossReplicaSum']
    self._collectives = [op for op in ops if op.type in _COLLECTIVES]
    self._ids = [op for op in ops if op.type == 'XlaReplicaId']
    inputs = [op for op in ops if op.type == 'TPUReplicatedInput']
    self.handles = [i for i in inputs if i.outputs[0].dtype == tf.resource]
    self._inputs = [i for i in inputs if i not in self.handles]
    # Ops that read or write variables.
    self._effects = [
      op
      for op in ops
      if op not in self.handles
      and any(t.dtype == tf.resource for t in op.inputs)
    ]
    self._results = [op for op in ops if op.type == 'TPUReplicatedOutput']

  # Reading.

  def pairs(self, permute):
    """Returns the constant `source_target_pairs` of a CollectivePermute."""
    pairs = tf.get_static_value(permute.inputs[1])
    return [tuple(pair) for pair in pairs.tolist()]

  def mismatch(self, schedule):
    """Describes how the permutes differ from a schedule for each buffer, or
    returns None.
    """
    pairs = [sorted(self.pairs(op)) for op in self.permutes]
    if not pairs:
      return 'no CollectivePermute'
    rounds = [
      sorted((t.src, t.dst) for t in transfers)
      for transfers in schedule.rounds()
    ]
    buffers = -(-len(pairs) // len(rounds))
    return None if pairs == rounds * buffers else f'the permutes are {pairs}'

  # Executing.

  def run(self, num_replicas, variables=(), order=None):
    """Executes the program on all replicas, round by round.

    In each round every replica computes from the values it has received so far,
    which are zeros at first. All values that it sends are delivered. Values
    that depend on completed rounds only are final.

    Args:
      num_replicas: number of replicas that run the program.
      variables: all distributed variables that the program uses. The program works
        on copies and does not change them.
      order: order[i] is the TensorFlow replica that XLA calls i; None means i.

    Returns:
      A list with the results of each TensorFlow replica, and for each of
      `variables` a list with each replica's final value.
    """
    order = order or list(range(num_replicas))
    constants = [
      [tf.get_static_value(v) for v in op.inputs] for op in self._inputs
    ]
    state = [[v.values[i].numpy() for v in variables] for i in order]
    copies = [tf.Variable(value) for value in state[0]]
    compute = self._compiled(
      [op.inputs[0] for op in (*self._collectives, *self._results)],
      {_handle_of(v): c.handle for v, c in zip(variables, copies, strict=True)},
    )
    came = [
      [np.zeros(op.outputs[0].shape, op.outputs[0].dtype.as_numpy_dtype)]
      * num_replicas
      for op in self._collectives
    ]
    is_done = False
    while not is_done:
      outputs, written = [], []
      for rank, replica in enumerate(order):
        for copy, value in zip(copies, state[rank], strict=True):
          copy.assign(value)
        computed = compute(
          np.int32(rank),
          [values[replica] for values in constants],
          [column[rank] for column in came],
        )
        outputs.append([t.numpy() for t in computed])
        written.append([copy.numpy() for copy in copies])
      before = [[value.tobytes() for value in column] for column in came]
      for i, op in enumerate(self._collectives):
        came[i] = self._play(op, [row[i] for row in outputs])
      after = [[value.tobytes() for value in column] for column in came]
      is_done = before == after
    ranks = [order.index(replica) for replica in range(num_replicas)]
    results = [outputs[rank][len(self._collectives) :] for rank in ranks]
    values = [[written[r][i] for r in ranks] for i in range(len(copies))]
    return results, values

  def _play(self, op, values):
    """Returns the value that each replica receives from a collective op.

    `values` contains the value that each replica sends.
    """
    if op.type == 'CollectivePermute':
      received = [np.zeros_like(value) for value in values]
      for src, dst in self.pairs(op):
        received[dst] = values[src]
      return received
    groups = tf.get_static_value(op.inputs[1]).tolist()
    if groups != [list(range(len(values)))]:
      raise AssertionError(
        f'Expected one group of all replicas in {op.name}, got {groups}.'
      )
    if op.type == 'CrossReplicaSum':
      return [np.sum(values, axis=0, dtype=values[0].dtype)] * len(values)
    # AllToAll only stacks here: all values have a leading dimension.
    return [
      np.concatenate([np.split(v, len(values))[r] for v in values])
      for r in range(len(values))
    ]

  def _compiled(self, fetches, variables):
    """Returns a function from the inputs at the cuts to `fetches`.

    Args:
      fetches: tensors of the graph.
      variables: {handle in the program: handle to use instead}.
    """
    cuts = [op.outputs[0].name for op in self._inputs]
    received = [op.outputs[0].name for op in self._collectives]
    names = [tensor.name for tensor in fetches]
    effects = self._effects
    fixed = {}
    for op in self.handles:
      external = {i.name: id(e) for e, i in self._graph.captures}
      fixed[op.outputs[0].name] = variables[external[op.inputs[0].name]]
    part = _between(
      self._graph,
      [t.op for t in fetches] + effects,
      [*cuts, *received, *fixed, *(op.outputs[0].name for op in self._ids)],
    )
    needed = {i for node in part.node for i in node.input}

    @tf.function(jit_compile=True, autograph=False)
    def compute(rank, inputs, came):
      given = dict(zip(cuts, inputs, strict=True))
      given.update(zip(received, came, strict=True))
      given.update({op.outputs[0].name: rank for op in self._ids})
      graph = tf.compat.v1.get_default_graph()
      given.update({name: graph.capture(h) for name, h in fixed.items()})
      outputs = tf.graph_util.import_graph_def(
        part,
        input_map={
          k: v for k, v in given.items() if k.removesuffix(':0') in needed
        },
        return_elements=[n for n in names if n not in given]
        + [op.name for op in effects],
      )
      with tf.control_dependencies(outputs[len(outputs) - len(effects) :]):
        outputs = iter(outputs)
        return [
          tf.identity(given[n] if n in given else next(outputs)) for n in names
        ]

    return compute


def _handle_of(variable):
  """Returns the identity of a distributed variable's handle in a graph."""
  packed = variable._packed_variable
  return id(
    variable._primary.handle if packed is None else packed.packed_handle
  )


def _between(graph, ops, cuts):
  """Returns the part of a graph that leads from `cuts` to `ops`, without devices."""
  cuts = {name.split(':')[0] for name in cuts}
  graph_def = graph.as_graph_def()
  nodes = {node.name: node for node in graph_def.node}
  part = tf.compat.v1.GraphDef(
    versions=graph_def.versions, library=graph_def.library
  )
  seen, waiting = set(cuts), [op.name for op in ops]
  while waiting:
    name = waiting.pop()
    if name not in seen:
      seen.add(name)
      part.node.add().CopyFrom(nodes[name])
      inputs = (i for i in nodes[name].input if not i.startswith('^'))
      waiting += [i.split(':')[0] for i in inputs]
  present = {node.name for node in part.node}
  for node in part.node:
    # Keeps the order of reads and writes. Removes the TPU attributes.
    inputs = [
      i for i in node.input if not i.startswith('^') or i[1:] in present
    ]
    del node.input[:]
    node.input.extend(inputs)
    node.device = ''
    for attribute in _TPU_ATTRIBUTES:
      node.attr.pop(attribute, None)
  return part
