"""Which stage of an input pipeline is the bottleneck; a command, see `__main__`.

  python -m tf_strategies.data.benchmark --data_path=mnist.npz
  python -m tf_strategies.data.benchmark --pipeline=my_program.input:dataset

Its parts are functions too:

  >>> import tensorflow as tf
  >>> from tf_strategies.data import benchmark
  >>> numbers = tf.data.Dataset.range(64).map(tf.square).batch(8)
  >>> profile = benchmark.profile(numbers, min_seconds=0)
  >>> profile.num_steps
  8
  >>> benchmark.judge(profile).sentence.startswith('bound by')
  True
"""

from tf_strategies.data.benchmark import slow_storage
from tf_strategies.data.benchmark.stages import Profile, Stage, profile
from tf_strategies.data.benchmark.verdict import Verdict, judge

__all__ = [
  'Profile',
  'Stage',
  'Verdict',
  'judge',
  'profile',
  'slow_storage',
]
