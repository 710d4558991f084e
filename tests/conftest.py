"""Settings that must hold before the first test module imports TensorFlow."""

import os
import re

# TensorFlow reads it when it is first imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import hypothesis
import pytest
from absl import flags

_SOAK = os.environ.get('TFS_SOAK') == '1'

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
  """Marks what a module's SOAK_CASES matches: cases cannot have marks."""
  for item in items:
    pattern = getattr(getattr(item, 'module', None), 'SOAK_CASES', None)
    if pattern and re.search(pattern, item.name):
      item.add_marker(pytest.mark.soak)
  if _SOAK:
    return
  skip = pytest.mark.skip(reason='a soak test: run it with `make soak`')
  for item in items:
    if 'soak' in item.keywords:
      item.add_marker(skip)
