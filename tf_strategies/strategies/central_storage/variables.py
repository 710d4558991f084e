"""Variables with one copy, on the parameter device, for all replicas.

All replicas read the same variable. A write must therefore happen once, not
once per replica, and only after all replicas have read. Merge calls, in which
replicas meet, ensure both. This class makes writes use merge calls.
"""

from __future__ import annotations

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.strategies.mirrored import run_context
from tf_strategies.strategies.mirrored import variables as mirrored_variables

ON_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


class CentralVariable(mirrored_variables.MirroredVariable):
  """A "mirrored" variable with one copy for all replicas."""

  is_central = True  # All replicas share one copy.

  def _get_replica(self, replica_id):
    del replica_id
    replica = run_context.current_replica_id()
    if replica is not None and _tf_internal.in_xla_context():
      extended = self.distribute_strategy.extended
      device = extended.worker_devices[replica]
      if device != self._values[0].device:
        raise errors.UnsupportedOptionError(
          f'{self.name!r} on {self._values[0].device} in a function with '
          f'jit_compile=True on {device}',
          'variables on the device for which XLA compiles',
          extended.compiled_fix,
        )
    return self._values[0]

  @property
  def handle(self):
    """Handle of the one copy, the same in every replica."""
    return self._values[0].handle

  def _update_replica(self, update_fn, value, **kwargs):
    extended = self.distribute_strategy.extended
    if extended._use_merge_call():
      return super()._update_replica(update_fn, value, **kwargs)
    if not run_context.are_gradients_reduced():
      # In a `tf.cond` of one replica. The first replica writes for all.
      if self.aggregation != ON_FIRST:
        raise run_context.branch_error()
      if run_context.current_replica_id() != 0:
        return self._values[0]
    return update_fn(self._values[0], value, **kwargs)


def rewrap(variable):
  """Returns a mirrored variable as a `CentralVariable`; other variables unchanged."""
  variable = mirrored_variables.rewrap(variable)
  if type(variable) is not mirrored_variables.MirroredVariable:
    return variable
  return CentralVariable(
    variable.distribute_strategy, variable.values, variable.aggregation
  )
