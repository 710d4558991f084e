"""Variables, and what draws random numbers."""

from __future__ import annotations

from tf_strategies import errors
from tf_strategies.spmd.kinds import HELD, WHOLE, Split, Value
from tf_strategies.spmd.plan import Context, Decision, rule


@rule('ReadVariableOp')
def _read(context: Context) -> Decision:
  resource = context.inputs[0].resource
  kind = HELD if resource is not None and resource.is_part else WHOLE
  return Decision([WHOLE], [context.out(kind)])


@rule('AssignVariableOp', 'AssignAddVariableOp', 'AssignSubVariableOp')
def _assign(context: Context) -> Decision:
  resource = context.inputs[0].resource
  if resource is None or not resource.is_part:
    if isinstance(context.inputs[1].kind, Split):
      # As of a stateful RNN: its batches are as long as the variable, which other
      # operations may rely on too.
      raise errors.UnsupportedOptionError(
        f'{context.node.type} {context.node.name!r} of a variable that holds the '
        'rows of a batch',
        'variables without an axis of the batch',
        'leave it out, such as stateful=True of an RNN, to share out the rows',
      )
    return Decision([WHOLE, WHOLE], [])
  return Decision([WHOLE, HELD], [])


@rule('VariableShape', 'VarIsInitializedOp')
def _about_variable(context: Context) -> Decision:
  shape = context.inputs[0].resource
  ints = None
  if context.node.type == 'VariableShape' and shape is not None:
    ints = getattr(shape, 'dims', None)
  return context.whole(ints=ints)


@rule('StatelessRandomGetKeyCounter', 'StatelessRandomGetAlg')
def _keys(context: Context) -> Decision:
  return context.whole()


@rule('NoOp', 'ControlTrigger')
def _nothing(context: Context) -> Decision:
  del context
  return Decision([], [], lambda site, inputs: [])


@rule('VarHandleOp', 'MutableHashTableV2', 'HashTableV2')
def _handles(context: Context) -> Decision:
  return Decision([], [Value(WHOLE, ())])
