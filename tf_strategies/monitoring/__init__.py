"""Monitoring of a job: where a step's time goes.

`tfs.MonitorCallback` is the callback for Keras's `fit`, `TrainingMonitor` is for
custom loops. `tfs timeline merge` puts the timelines of a job on one clock.
"""

from tf_strategies.monitoring.training_monitor import TrainingMonitor

__all__ = ['TrainingMonitor']


def __dir__() -> list[str]:
  return __all__
