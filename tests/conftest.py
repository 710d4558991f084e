"""Settings that must hold before the first test module imports TensorFlow."""

import os

# TensorFlow reads it when it is first imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import hypothesis
import pytest
from absl import flags

from tests import tiers

_SOAK = os.environ.get('TFS_SOAK') == '1'
_terminal = None

# No app.run() parses the flags under pytest, and an unparsed flag raises.
flags.FLAGS.mark_as_parsed()

# A shared machine may stall any single example, so none has a deadline. The
# ordinary run draws the same examples every time; the soak run draws new ones.
hypothesis.settings.register_profile(
  'default_run', deadline=None, derandomize=True
)
hypothesis.settings.register_profile('soak', deadline=None, max_examples=2000)
hypothesis.settings.load_profile('soak' if _SOAK else 'default_run')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Adds the marks of single rows; skips what only `make soak` runs."""
  skip = pytest.mark.skip(reason='a soak test: run it with `make soak`')
  for item in items:
    mark = tiers.mark_of(getattr(item, 'function', None), item.name)
    if mark:
      item.add_marker(mark)
    if 'soak' in item.keywords and not _SOAK:
      item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
  """Keeps the run's terminal, which the hook of reports is not given."""
  global _terminal
  _terminal = config.pluginmanager.get_plugin('terminalreporter')


def pytest_runtest_logreport(report):
  """Names a failure at once: a run that is cut off must not swallow it."""
  if report.failed and _terminal is not None:
    _terminal.write_line(
      f'\nFAILED {report.nodeid}\n{report.longreprtext[-3000:]}'
    )
