"""Settings that must hold before the first test module imports TensorFlow."""

import os
import random
import sys
import time

# TensorFlow reads this variable during its first import.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import hypothesis
import pytest
from absl import flags

from tests import device_counts, processes, tiers

_SOAK = os.environ.get('TFS_SOAK') == '1'
NO_TIME = 'the soak run has ended'

# No app.run() parses the flags under pytest, and an unparsed flag raises.
flags.FLAGS.mark_as_parsed()

# A shared machine may stall any example, so examples have no time limit. The
# ordinary run draws the same examples every time; the soak run draws new ones.
_UNTIMED = {
  'deadline': None,
  'suppress_health_check': [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile(
  'default_run', derandomize=True, **_UNTIMED
)
hypothesis.settings.register_profile('soak', max_examples=2000, **_UNTIMED)
hypothesis.settings.load_profile('soak' if _SOAK else 'default_run')


@pytest.fixture(autouse=True)
def _leaves_no_name_scope():
  """Fails a test that leaves a name scope open, which would rename later variables."""
  yield
  keras_names = sys.modules.get('keras.src.backend.common.name_scope')
  assert keras_names is None or not keras_names.current_path()


def pytest_addoption(parser):
  """Adds the options that the Makefile uses."""
  parser.addoption(
    '--device',
    choices=('cpu', 'gpu'),
    help='run the tests that compute on devices, on logical CPUs or GPUs. If there '
    'is no GPU, no test runs.',
  )
  parser.addoption(
    '--most-seconds',
    type=float,
    help='fail if the tests take longer than this, times TFS_DEADLINE_FACTOR.',
  )
  parser.addoption(
    '--soak-minutes',
    type=float,
    help='run the tests in random order, and start no test after so many minutes.',
  )
  parser.addoption(
    '--soak-seed', type=int, default=1, help='seed of the order of the tests.'
  )


def _has_gpu() -> bool:
  import tensorflow as tf

  return bool(tf.config.list_physical_devices('GPU'))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
  """Adds the marks of single rows, and skips rows that only `make soak` runs."""
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


class Soak:
  """Runs tests in random order, file by file, until the time is over.

  The tests of a file stay together, as `--dist loadfile` requires. The tests of
  a class also stay together.
  """

  def __init__(self, seed, minutes):
    self._seed = seed
    self._minutes = minutes
    self._ends_at = None
    self._ran, self._left = set(), set()

  @pytest.hookimpl(trylast=True)
  def pytest_collection_modifyitems(self, items):
    """Shuffles the tests in the same way in every process, and starts the clock."""
    self._ends_at = time.monotonic() + 60 * self._minutes

    def draw(*names):
      return [random.Random(f'{self._seed} {n}').random() for n in names]

    # `a/b_test.py::Class::test` gives the file, the class and the test.
    items.sort(
      key=lambda i: draw(i.nodeid.split('::')[0], i.parent.nodeid, i.nodeid)
    )

  @pytest.hookimpl(tryfirst=True)
  def pytest_runtest_setup(self):
    """Skips tests that would start after the end."""
    if time.monotonic() > self._ends_at:
      pytest.skip(NO_TIME)

  def pytest_runtest_logreport(self, report):
    """Counts the tests that ran."""
    no_time = report.skipped and NO_TIME in report.longreprtext
    (self._left if no_time else self._ran).add(report.nodeid)

  def pytest_unconfigure(self, config):
    """Prints the number of tests and the seed."""
    ran, left = len(self._ran - self._left), len(self._left)
    if terminal := config.pluginmanager.get_plugin('terminalreporter'):
      terminal.write_line(
        f'soak: {ran} of {ran + left} tests ran in {self._minutes:g} minutes, '
        f'in the order of SOAK_SEED={self._seed}'
      )


class MostSeconds:
  """Fails a run whose tests take too long, counted from the first test."""

  def __init__(self, seconds, factor=processes.DEADLINE_FACTOR):
    self._limit = seconds * factor
    self._started = None
    self._took = 0.0

  def pytest_runtest_logstart(self):
    """Starts the clock at the first test."""
    self._started = self._started or time.monotonic()

  @pytest.hookimpl(trylast=True)
  def pytest_sessionfinish(self, session):
    """Fails a run that passed, but took too long."""
    if self._started is not None:
      self._took = time.monotonic() - self._started
    if self._took > self._limit and session.exitstatus == pytest.ExitCode.OK:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  def pytest_terminal_summary(self, terminalreporter):
    """Prints the time."""
    terminalreporter.write_line(
      f'the tests took {self._took:.0f} s, and may take {self._limit:.0f} s'
    )


class _NoGpu:
  """Runs no test on a machine without a GPU, and reports it."""

  def pytest_ignore_collect(self):
    """Ignores all modules, because some need a GPU at import."""
    return True

  def pytest_sessionfinish(self, session):
    """Ends successfully: a missing GPU is not a failure."""
    session.exitstatus = pytest.ExitCode.OK

  def pytest_terminal_summary(self, terminalreporter):
    """Prints that no test ran."""
    terminalreporter.write_line('--device=gpu: no GPU on this machine: 0 ran')


class _Failures:
  """Prints each failure at once, so that an interrupted run still shows it."""

  def __init__(self, terminal):
    self._terminal = terminal

  def pytest_runtest_logreport(self, report):
    """Prints the end of a failed test's report."""
    if report.failed:
      self._terminal.write_line(
        f'\nFAILED {report.nodeid}\n{report.longreprtext[-3000:]}'
      )


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
  """Chooses the devices and registers plugins that need the run's terminal.

  The processes of xdist have no terminal.
  """
  device = config.getoption('--device')
  if device == 'gpu' and not _has_gpu():
    config.pluginmanager.register(_NoGpu())
  elif device:
    # `virtual_devices` reads this variable, also in processes that tests start.
    os.environ['TFS_TEST_DEVICE'] = device
    # TF32 has only 10 bits. Processes that tests start may forget to disable
    # it.
    os.environ['NVIDIA_TF32_OVERRIDE'] = '0'
  if minutes := config.getoption('--soak-minutes'):
    config.pluginmanager.register(
      Soak(config.getoption('--soak-seed'), minutes)
    )
  terminal = config.pluginmanager.get_plugin('terminalreporter')
  if terminal is not None:
    if seconds := config.getoption('--most-seconds'):
      config.pluginmanager.register(MostSeconds(seconds))
    config.pluginmanager.register(_Failures(terminal))
    if device:
      config.pluginmanager.register(device_counts.DeviceCounts(device))
