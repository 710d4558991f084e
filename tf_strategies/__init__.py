"""TensorFlow strategies that are exact under Keras 3.

>>> import tensorflow as tf
>>> import tf_strategies as tfs
>>> strategy = tfs.RingMirroredStrategy(devices=['CPU:0'])
>>> with strategy.scope():
...   model = tf.keras.Sequential([tf.keras.Input([3]),
...                                tf.keras.layers.Dense(1)])
...   model.compile(tfs.keras.DistributedOptimizer('adam'), 'mse')
"""

from tf_strategies import (
  cluster,
  collectives,
  data,
  errors,
  keras,
  process_group,
)
from tf_strategies.cross_device import (
  AutoAllReduce,
  DirectAllReduce,
  HalvingDoublingAllReduce,
  HierarchicalRingAllReduce,
  NaiveAllReduce,
  RingAllReduce,
  TreeAllReduce,
)
from tf_strategies.strategies import (
  STRATEGY_NAMES,
  MultiWorkerCollectiveStrategy,
  MultiWorkerRingStrategy,
  RingMirroredStrategy,
  RingOptions,
  create_strategy,
)
from tf_strategies.training import elastic
from tf_strategies.training.elastic import ElasticOptions
from tf_strategies.version import __version__

__all__ = [
  'STRATEGY_NAMES',
  'AutoAllReduce',
  'DirectAllReduce',
  'ElasticOptions',
  'HalvingDoublingAllReduce',
  'HierarchicalRingAllReduce',
  'MultiWorkerCollectiveStrategy',
  'MultiWorkerRingStrategy',
  'NaiveAllReduce',
  'RingAllReduce',
  'RingMirroredStrategy',
  'RingOptions',
  'TreeAllReduce',
  '__version__',
  'cluster',
  'collectives',
  'create_strategy',
  'data',
  'elastic',
  'errors',
  'keras',
  'process_group',
]
