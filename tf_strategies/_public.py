"""The public names of the package: the one table of them.

`tf_strategies` offers what this module imports, and imports it when the first
of these names is used: TensorFlow takes seconds to load, and neither the
launcher nor `tfs.cluster` needs it.
"""

from tf_strategies.cross_device import (
  AutoAllReduce,
  RingAllReduce,
  ScheduledAllReduce,
)
from tf_strategies.fault_tolerance import elastic
from tf_strategies.fault_tolerance.elastic_options import ElasticOptions
from tf_strategies.fault_tolerance.evaluator import SidecarEvaluator
from tf_strategies.fault_tolerance.preemption import (
  Preemption,
  PreemptionCheckpoint,
)
from tf_strategies.fault_tolerance.resume_fit import ResumeFit
from tf_strategies.fault_tolerance.run_checkpoint import RunCheckpoint
from tf_strategies.monitoring.keras_callback import MonitorCallback
from tf_strategies.strategies import (
  STRATEGY_NAMES,
  CentralStorageStrategy,
  CollectiveOptions,
  MultiWorkerCollectiveStrategy,
  MultiWorkerRingStrategy,
  ParameterServerStrategy,
  RingMirroredStrategy,
  RingOptions,
  TPURingStrategy,
  create_strategy,
)

__all__ = [
  'STRATEGY_NAMES',
  'AutoAllReduce',
  'CentralStorageStrategy',
  'CollectiveOptions',
  'ElasticOptions',
  'MonitorCallback',
  'MultiWorkerCollectiveStrategy',
  'MultiWorkerRingStrategy',
  'ParameterServerStrategy',
  'Preemption',
  'PreemptionCheckpoint',
  'ResumeFit',
  'RingAllReduce',
  'RingMirroredStrategy',
  'RingOptions',
  'RunCheckpoint',
  'ScheduledAllReduce',
  'SidecarEvaluator',
  'TPURingStrategy',
  'create_strategy',
  'elastic',
]
