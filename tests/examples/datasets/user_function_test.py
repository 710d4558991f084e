"""A function named on the command line is found, or the error names its option."""

import os
import sys
from unittest import mock

from absl.testing import absltest, parameterized

from examples.datasets import user_function
from tf_strategies import errors


class UserFunctionTest(parameterized.TestCase):
  def test_finds_a_module_of_the_current_directory(self):
    where = self.create_tempdir()
    where.create_file('of_this_test.py', 'def double(x):\n  return 2 * x\n')
    with (
      mock.patch.object(os, 'getcwd', return_value=where.full_path),
      mock.patch.object(sys, 'path', list(sys.path)),
    ):
      function = user_function.find('convert', 'of_this_test:double')
    self.assertEqual(function(4), 8)

  @parameterized.parameters(
    ('convert', 'write --convert='),
    ('no_such_module_here:convert', 'cannot import no_such_module_here'),
    ('os:sep', 'os has no function sep'),
  )
  def test_refuses(self, name, words):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f'convert={name!r}.*{words}'
    ):
      user_function.find('convert', name)


if __name__ == '__main__':
  absltest.main()
