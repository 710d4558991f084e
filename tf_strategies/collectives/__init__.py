"""Describes collectives by schedules, without TensorFlow.

Example:

  >>> from tf_strategies.collectives import algorithms
  >>> algorithms.build('ring', 4).num_rounds
  6
"""
