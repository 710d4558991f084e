"""Monitoring of a job: where a step's time goes, and which rank stalls it.

`tfs.MonitorCallback` is the callback for Keras's `fit`, `TrainingMonitor` is for
custom loops. Commands: `python -m tf_strategies.monitoring.merge` and
`python -m tf_strategies.monitoring.plot`.
"""

from tf_strategies.monitoring.training_monitor import (
  MonitorOptions,
  TrainingMonitor,
  parse_steps,
)

__all__ = ['MonitorOptions', 'TrainingMonitor', 'parse_steps']
