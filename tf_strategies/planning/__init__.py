"""What communication will cost before anything trains: `tfs.plan`.

Example:

  >>> from tf_strategies import planning
  >>> from tf_strategies.collectives import Link, Topology
  >>> network = Topology(8, Link(alpha_seconds=5e-5, beta_seconds_per_byte=1e-9))
  >>> planning.plan([4_000_000], network).best().algorithm
  'ring'
"""

from tf_strategies.planning.planner import Plan, Way, extrapolate, plan

__all__ = ['Plan', 'Way', 'extrapolate', 'plan']
