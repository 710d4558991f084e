"""Settings that must hold before the first test module imports TensorFlow."""

import os

# TensorFlow reads it when it is first imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import hypothesis
import pytest
from absl import flags

from tests import device_counts, tiers

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


def pytest_addoption(parser):
  """Adds --device."""
  parser.addoption(
    '--device',
    choices=('cpu', 'gpu'),
    help='run what computes on devices, on these: logical CPUs, or GPUs. If there '
    'is no GPU, nothing runs.',
  )


def _has_gpu() -> bool:
  import tensorflow as tf

  return bool(tf.config.list_physical_devices('GPU'))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
  """Adds the marks of single rows; skips what only `make soak` runs."""
  if config.getoption('--device'):
    chosen = [item for item in items if tiers.is_on_devices(item.path)]
    others = [item for item in items if not tiers.is_on_devices(item.path)]
    config.hook.pytest_deselected(items=others)
    items[:] = chosen
  skip = pytest.mark.skip(reason='a soak test: run it with `make soak`')
  for item in items:
    mark = tiers.mark_of(getattr(item, 'function', None), item.name)
    if mark:
      item.add_marker(mark)
    if item.get_closest_marker('soak') and not _SOAK:
      item.add_marker(skip)


class _NoGpu:
  """Runs nothing, and says so: there is no GPU to run it on."""

  def pytest_ignore_collect(self):
    """Modules that ask for a GPU are not even imported."""
    return True

  def pytest_sessionfinish(self, session):
    """It is no failure that there is none."""
    session.exitstatus = pytest.ExitCode.OK

  def pytest_terminal_summary(self, terminalreporter):
    """Tells it."""
    terminalreporter.write_line('--device=gpu: no GPU on this machine: 0 ran')


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
  """Chooses the devices; registers what needs the run's terminal.

  The processes of xdist have none.
  """
  device = config.getoption('--device')
  if device == 'gpu' and not _has_gpu():
    config.pluginmanager.register(_NoGpu())
  elif device:
    # `virtual_devices` reads it, also in processes that tests start.
    os.environ['TFS_TEST_DEVICE'] = device
    # TF32 has 10 bits. What a test starts may not say so to TensorFlow.
    os.environ['NVIDIA_TF32_OVERRIDE'] = '0'
  terminal = config.pluginmanager.get_plugin('terminalreporter')
  if terminal is not None:
    config.pluginmanager.register(_Failures(terminal))
    if device:
      config.pluginmanager.register(device_counts.DeviceCounts(device))
