"""What each operation makes of split and partial inputs; see `spmd.plan`."""

from tf_strategies.spmd.rules import (  # noqa: F401  Registered when imported.
  control,
  elementwise,
  integers,
  linear_algebra,
  reductions,
  sequences,
  shapes,
  shards,
)
