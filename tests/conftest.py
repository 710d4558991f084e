"""Settings that must hold before the first test module imports TensorFlow."""

import os

# TensorFlow reads it when it is first imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import hypothesis
import pytest
from absl import flags

from tests import tiers

_SOAK = os.environ.get('TFS_SOAK') == '1'

# No app.run() parses the flags under pytest, and an unparsed flag raises.
flags.FLAGS.mark_as_parsed()

# A shared machine may stall any single example, so none is judged by the clock.
# The ordinary run draws the same examples every time; the soak run draws new ones.
_UNTIMED = {
  'deadline': None,
  'suppress_health_check': [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile(
  'default_run', derandomize=True, **_UNTIMED
)
hypothesis.settings.register_profile('soak', max_examples=2000, **_UNTIMED)
hypothesis.settings.load_profile('soak' if _SOAK else 'default_run')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Adds the marks of single rows; skips what only `make soak` runs."""
  skip = pytest.mark.skip(reason='a soak test: run it with `make soak`')
  for item in items:
    mark = tiers.mark_of(getattr(item, 'function', None), item.name)
    if mark:
      item.add_marker(mark)
    if item.get_closest_marker('soak') and not _SOAK:
      item.add_marker(skip)


class _Failures:
  """Names a failure at once: a run that is cut off must not swallow it."""

  def __init__(self, terminal):
    self._terminal = terminal

  def pytest_runtest_logreport(self, report):
    """Prints the end of what a failed test reports."""
    if report.failed:
      self._terminal.write_line(
        f'\nFAILED {report.nodeid}\n{report.longreprtext[-3000:]}'
      )


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
  """Registers what needs the run's terminal: the processes of xdist have none."""
  terminal = config.pluginmanager.get_plugin('terminalreporter')
  if terminal is not None:
    config.pluginmanager.register(_Failures(terminal))
