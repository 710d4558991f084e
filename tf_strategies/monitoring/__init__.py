"""Monitoring of a job: where a step's time goes, and which rank stalls it.

`tfs.MonitorCallback` is the callback for Keras's `fit`, `TrainingMonitor` is for
custom loops. Commands: `tfs timeline merge` and `tfs timeline
plot`.
"""

from tf_strategies.monitoring.training_monitor import (
  MonitorOptions,
  TrainingMonitor,
  parse_steps,
)

__all__ = ['MonitorOptions', 'TrainingMonitor', 'parse_steps']
