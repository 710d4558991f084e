"""Monitoring of a job: where a step's time goes.

`tfs.MonitorCallback` is the callback for Keras's `fit`, `TrainingMonitor` is for
custom loops.
"""

from tf_strategies.monitoring.training_monitor import TrainingMonitor

__all__ = ['TrainingMonitor']


def __dir__() -> list[str]:
  return __all__
