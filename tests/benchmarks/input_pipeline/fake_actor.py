"""A fake variant that yields ten items a step and fails as its name says."""

import time


class Actor:
  """Answers the calls of `rounds.run`."""

  def __init__(self, rank):
    self._runs = 0

  def open(self, variant, spec):
    self._how = variant

  def run(self, train_step_s):
    self._runs += 1
    if self._how == 'raises':
      raise ValueError('no')
    if self._how == 'hangs' and self._runs == 2:
      time.sleep(600)
    steps = 0 if self._how == 'empty' else 5
    return {
      'seconds': 0.5,
      'first_batch_s': 0.1,
      'num_steps': steps,
      'num_items': 10 * steps,
    }
