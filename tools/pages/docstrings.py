"""Makes docstrings in this project's style Markdown, for the API reference.

They are indented by two spaces, where Markdown wants four for code, and examples
stand under `Example:`, where the reader of Google's style knows `Examples:`.
"""

import re

import griffe

_INDENT = re.compile(r'^( +)', re.MULTILINE)
_EXAMPLE = re.compile(r'^Example:\n+', re.MULTILINE)


class Docstrings(griffe.Extension):
  """Rewrites each docstring when its object was read."""

  def on_object(self, *, obj, **_) -> None:
    """Doubles indents, and names sections as griffe does."""
    if obj.docstring is not None:
      text = _INDENT.sub(r'\1\1', obj.docstring.value)
      obj.docstring.value = _EXAMPLE.sub('Examples:\n', text)
