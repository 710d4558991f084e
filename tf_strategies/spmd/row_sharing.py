"""Whether workers that share the rows of a batch may compute without meeting.

Each worker runs the program on its own rows. Their results are then combined: sums
over rows are added, and means over rows are averaged with weights. To tell them apart,
`powers` follows how each tensor depends on the number of rows. A sum of rows has the
power 1, and the number of rows too. A sum that is divided by the number of rows has
the power 0, as has everything that is the same for any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.spmd import kinds, plan
from tf_strategies.spmd import program as program_lib
from tf_strategies.spmd.rules import sequences

# Powers: `_ANY` of zeros, `_SHAPE` of a shape some of whose lengths are rows.
_ANY, _SHAPE = 'any', 'shape'
_NO_ROWS = 0, _ANY

# Inputs in each of which an operation is linear.
_FACTORS = {
  **plan.FACTORS,
  **dict.fromkeys(
    [
      'BroadcastTo',
      'Cast',
      'EluGrad',
      'Identity',
      'LeakyReluGrad',
      'Mean',
      'PreventGradient',
      'Relu6Grad',
      'ReluGrad',
      'Reshape',
      'ResizeBilinearGrad',
      'SeluGrad',
      'SoftplusGrad',
      'StopGradient',
      'TensorListFromTensor',
      'TensorListGather',
      'TensorListGetItem',
      'TensorListPopBack',
      'TensorListStack',
      'Tile',
    ],
    (0,),
  ),
  **dict.fromkeys(
    [
      'AvgPool3DGrad',
      'AvgPoolGrad',
      'Fill',
      'RsqrtGrad',
      'SigmoidGrad',
      'SqrtGrad',
      'TanhGrad',
    ],
    (1,),
  ),
  **dict.fromkeys(['MaxPool3DGrad', 'MaxPoolGrad'], (2,)),
  **dict.fromkeys(
    [
      'Conv2DBackpropFilter',
      'Conv3DBackpropFilterV2',
      'DepthwiseConv2dNativeBackpropFilter',
    ],
    (0, 2),
  ),
}
# Inputs that an operation adds up, or puts into one list.
_TERMS = {
  **plan.TERMS,
  'BiasAdd': slice(None),
  'Select': slice(1, None),
  'TensorListPushBack': slice(None),
  'TensorListScatterIntoExistingList': slice(2),
  'TensorListSetItem': slice(0, 3, 2),
}
_POWERS = {
  **dict.fromkeys(['EmptyTensorList', 'TensorListReserve', 'ZerosLike'], _ANY),
  # These do not depend on the contents of their inputs.
  **dict.fromkeys(['BroadcastGradientArgs', 'ConcatOffset', 'OnesLike'], 0),
  # Each share would add the tensor again.
  **dict.fromkeys(['TensorScatterAdd', 'TensorScatterSub']),
}


def powers(graph, num_batched: int, outputs: Sequence[tf.Tensor]) -> list[int]:
  """Returns 1 for each output that is a sum over rows, and 0 for other outputs.

  Those are means over rows, or do not depend on the rows.

  Args:
    graph: the graph of a function whose first `num_batched` inputs have rows.
    num_batched: the number of those inputs.
    outputs: tensors of the graph. Operations that they do not need are left out.

  Raises:
    NeedsExchangeError: workers cannot share the rows. The message names the operation.
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
  except errors.UnsupportedOptionError as error:
    raise plan.NeedsExchangeError(str(error)) from None
  found = _follow(planned, [0] * len(arguments))
  return [_of_output(t, planned.values[t].kind, found) for t in whole.outputs]


def _of_output(tensor, kind, found) -> int:
  if isinstance(kind, kinds.Part) and not plan.is_sum(kind):
    raise plan.NeedsExchangeError(
      f'{tensor.node.type} {tensor.node.name!r} is the {kind.op} of rows'
    )
  power = found[tensor]
  if power == _ANY:
    return 0
  if isinstance(kind, kinds.Split) and isinstance(power, int):
    power += 1
  if power in (0, 1):
    return power
  first = tensor
  while unknown := [t for t in first.node.inputs if found[t] is None]:
    first = unknown[0]
  raise plan.NeedsExchangeError(
    f'{first.node.type} {first.node.name!r} is neither a sum nor a mean over rows'
  )


def _follow(planned: plan.Plan, given: Sequence[Any]) -> dict[Any, Any]:
  """Returns the power of each tensor of a program; None where it has no one power."""
  found = dict(zip(planned.program.inputs, given, strict=True))
  for node, decision in planned.decisions.items():
    inputs = [found[t] for t in node.inputs]
    if decision.bodies:
      powers_of = _of_bodies(decision.bodies, inputs)
    else:
      powers_of = [_of_operation(planned, node, inputs)] * len(node.outputs)
    for tensor, power in zip(node.outputs, powers_of, strict=True):
      ints = planned.values[tensor].ints
      if tensor.dtype.is_floating and sequences.is_zero(tensor):
        power = None if power is None else _ANY
      elif ints and None not in inputs:
        counts = {i.symbols.count(kinds.BATCH) for i in ints}
        if len(counts) == 1 and all(i.is_of_rows for i in ints):
          [power] = counts
        elif counts != {0}:
          power = _SHAPE
      found[tensor] = power
  return found


def _is_sum(kind) -> bool:
  """Returns whether it is a sum over replicas, or a list of such."""
  return plan.is_sum(kind.kind if isinstance(kind, kinds.Listed) else kind)


def _of_bodies(plans, given) -> list[Any]:
  """Returns the powers of the results of a branch or a loop."""

  def results(name, arguments):
    program = plans[name].program
    found = _follow(plans[name], arguments)
    return [found[t] for t in program.outputs]

  if 'body' not in plans:
    chosen, *given = given
    rows = [results(name, given) for name in plans]
    found = [_same(column) for column in zip(*rows, strict=True)]
    return found if chosen in _NO_ROWS else [None] * len(found)
  while True:
    after = list(map(_same, zip(given, results('body', given), strict=True)))
    if after == given:
      break
    given = after
  is_counted = results('cond', given)[0] in _NO_ROWS
  return given if is_counted else [None] * len(given)


def _same(found) -> Any:
  """Returns the one power of terms; None if they differ."""
  others = {power for power in found if power != _ANY}
  return others.pop() if len(others) == 1 else None if others else _ANY


def _of_operation(planned, node, given) -> Any:
  """Returns the power of an operation's results."""
  if None in given:
    return None
  if node.type in _POWERS:
    return _POWERS[node.type]
  values = [planned.values[t] for t in node.inputs]
  outputs = [planned.values[t].kind for t in node.outputs]
  everything = range(len(given))
  terms = everything[_TERMS.get(node.type, slice(0))]
  linear = _FACTORS.get(node.type, terms)
  if node.type == 'Cast' and not node.outputs[0].dtype.is_floating:
    linear = terms  # It rounds.
  is_squeezed = node.type == 'Squeeze' and not node.attr('squeeze_dims')
  if is_squeezed and kinds.WHOLE not in outputs:
    return None  # It would squeeze a share of one row.
  power = 0
  for i in everything:
    if i in linear:
      continue
    if node.type in ('DivNoNan', 'RealDiv'):
      if given[i] in (_SHAPE, _ANY):
        return None
      power -= given[i]
    elif given[i] not in _NO_ROWS:
      # A shape with as many rows, along the axis of rows, is each share's own shape.
      ints = values[i].ints
      if not linear or ints is None:
        return None
      result = planned.values[node.outputs[0]]
      rows = [axis for axis, d in enumerate(ints) if d.has_batch]
      is_own = len(ints) == result.rank and rows == [
        getattr(result.kind, 'axis', None)
      ]
      if rows and not is_own and not node.type.startswith('TensorList'):
        return None
  found = [given[i] for i in linear]
  if _SHAPE in found:  # As numbers, its lengths have several powers.
    are_floats = any(t.dtype.is_floating for t in node.outputs)
    return None if are_floats else _SHAPE
  if not terms and _ANY in found:
    return _ANY
  power = _same(found) if terms else power + sum(found)
  was_sum = any(_is_sum(v.kind) for v in values)
  if power in (None, _ANY) or was_sum or not any(map(_is_sum, outputs)):
    return power
  if node.type != 'Mean':
    return power + 1
  # The sum over rows is divided by their number, if all rows are of one length.
  return power if all(d.is_of_rows for d in values[0].dims) else None
