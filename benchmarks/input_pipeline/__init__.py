"""Which stage of an input pipeline is the bottleneck; a command, see `__main__`.

  python -m benchmarks.input_pipeline --data_path=mnist.npz
  python -m benchmarks.input_pipeline --pipeline=my_program.input:dataset

Its parts are functions too:

  >>> import tensorflow as tf
  >>> from benchmarks import input_pipeline
  >>> numbers = tf.data.Dataset.range(64).map(tf.square).batch(8)
  >>> profile = input_pipeline.profile(numbers, min_seconds=0)
  >>> profile.num_steps
  8
  >>> input_pipeline.judge(profile).sentence.startswith('bound by')
  True
"""

from benchmarks.input_pipeline import slow_storage
from benchmarks.input_pipeline.stages import Profile, Stage, profile
from benchmarks.input_pipeline.verdict import Verdict, judge

__all__ = [
  'Profile',
  'Stage',
  'Verdict',
  'judge',
  'profile',
  'slow_storage',
]
