"""Eyes on a running job: where time goes, and who waits for whom.

`tfs.MonitorCallback` is the Keras callback, `TrainingMonitor` the same for a loop
of one's own. Commands: `python -m tf_strategies.monitoring.merge` and
`python -m tf_strategies.monitoring.plot`.
"""

from tf_strategies.monitoring.training_monitor import (
  MonitorOptions,
  TrainingMonitor,
  parse_steps,
)

__all__ = ['MonitorOptions', 'TrainingMonitor', 'parse_steps']
