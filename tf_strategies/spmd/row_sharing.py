"""Whether workers that share the rows of a batch may compute without meeting."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.spmd import kinds, plan
from tf_strategies.spmd import program as program_lib


def why_rows_meet(
  graph, num_batched: int, outputs: Sequence[tf.Tensor]
) -> str | None:
  """Returns why a function needs all rows at once, so that workers cannot share them.

  Args:
    graph: the graph of a function whose first `num_batched` inputs have rows.
    num_batched: the number of those inputs.
    outputs: tensors of the graph that are rows, or sums or means over rows.
      Operations that they do not need are left out.

  Returns:
    The operation that needs all rows, or None.
  """
  whole = program_lib.flatten(graph, graph.inputs, outputs)
  needed = {tensor.node for tensor in whole.outputs}
  for node in reversed(whole.nodes):
    if node in needed:
      needed.update(tensor.node for tensor in node.inputs)
  arguments = [
    kinds.Value(
      kinds.Split(0) if i < num_batched and t.shape.rank else kinds.WHOLE
    )
    for i, t in enumerate(graph.inputs)
  ]
  nodes = [node for node in whole.nodes if node in needed]
  for node in nodes:
    node.before = []
  program = program_lib.Program(nodes, whole.inputs, whole.outputs)
  try:
    planned = plan.make(program, arguments, may_meet=False)
  except (plan.NeedsExchangeError, errors.UnsupportedOptionError) as error:
    return str(error)
  for tensor in whole.outputs:
    kind = planned.values[tensor].kind
    if isinstance(kind, kinds.Part) and kind != kinds.SUM:
      return f'{tensor.node.type} {tensor.node.name!r} is the {kind.op} of rows'
  for node in nodes:
    lengths = [n for t in node.inputs for n in planned.values[t].ints or ()]
    if node.type == 'Range' and any(n.has_batch for n in lengths):
      return f'Range {node.name!r} numbers the rows'
  return None
