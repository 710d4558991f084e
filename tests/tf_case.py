"""The base of tests that compare tensors."""

import functools
import os

import tensorflow as tf
from absl.testing import parameterized


class TestCase(tf.test.TestCase, parameterized.TestCase):
  """Compares tensors. Its tests may have parameters and a directory."""

  @functools.cached_property
  def directory(self) -> str:
    """The path of a directory that only this test uses."""
    return self.create_tempdir().full_path

  def path(self, name: str) -> str:
    """Returns the path of a file in `directory`."""
    return os.path.join(self.directory, name)
