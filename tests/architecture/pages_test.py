"""The site's additions to docs/: links, API names, drawn schedules."""

import re

import pytest
from absl.testing import absltest, parameterized

from tests import docstrings
from tests.architecture import project
from tools.pages import hooks

pytestmark = pytest.mark.smoke


class PagesTest(parameterized.TestCase):
  @parameterized.parameters('draw_schedule', 'hooks')
  def test_examples_run(self, name):
    docstrings.assert_examples(self, f'tools.pages.{name}')

  @parameterized.parameters(
    ('index.md', '[a](docs/x.md)', '[a](x.md)'),
    ('index.md', '![a](benchmarks/b.png)', '![a](images/b.png)'),
    ('clusters.md', '[a](../docs/gpus.md#x)', '[a](gpus.md#x)'),
    ('gpus.md', '[a](../ARCHITECTURE.md#b)', '[a](architecture.md#b)'),
    ('gpus.md', '[`a`](https://b.org)', '[`a`](https://b.org)'),
    ('gpus.md', '[a](#here) [b](../tools/lint.sh)', '[a](#here) b'),
    ('gpus.md', '```\n[a](../README.md)\n```', '```\n[a](../README.md)\n```'),
  )
  def test_links_are_rewritten_for_the_site(self, uri, text, expected):
    self.assertEqual(hooks.links_of_site(text, uri, None), expected)

  def test_every_page_is_in_the_navigation(self):
    files = project.text_files()
    named = set(re.findall(r': ([\w/]+\.md)$', files['mkdocs.yml'], re.M))
    made = {f'api/{room}.md' for room in hooks._ROOMS} | set(
      hooks._PAGES.values()
    )
    written = {path[5:] for path in files if re.fullmatch(r'docs/.*\.md', path)}
    self.assertEqual(named, made | written)

  def test_every_public_name_is_in_the_reference(self):
    listed = {
      name.rpartition('.')[2]
      for room in hooks._ROOMS
      for name in hooks.public_names(room)
    }
    packages = hooks._imported_rooms()
    public = {name for _, name in hooks._imports('_public')} - packages
    self.assertContainsSubset(public, listed)
    self.assertContainsSubset(packages, hooks._ROOMS)
    self.assertContainsSubset({'errors', 'run_task', 'make_dataset'}, listed)


if __name__ == '__main__':
  absltest.main()
