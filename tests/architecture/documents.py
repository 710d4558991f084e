"""Reads the code blocks of the project's documents."""

import dataclasses
import re
import shlex
from collections.abc import Iterator

_FENCE = re.compile(
  r'^```(\w*)(?: title="([^"]*)")?[^\n]*\n(.*?)^```', re.MULTILINE | re.DOTALL
)
_SHELLS = ('bash', 'sh', 'shell', 'console')


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced code block.

  Attributes:
    language: language after the first fence.
    title: name of the file that the reader should create; '' for none.
    body: the code.
  """

  language: str
  title: str
  body: str


def blocks(text: str, *languages: str) -> Iterator[Block]:
  """Yields the blocks of a document in these languages, in order."""
  for found in _FENCE.findall(text):
    if found[0] in languages:
      yield Block(*found)


def commands(text: str) -> Iterator[list[str]]:
  """Yields the words of each command, with continuation lines joined."""
  for block in blocks(text, *_SHELLS):
    for line in block.body.replace('\\\n', ' ').splitlines():
      line = line.removeprefix('$ ')
      for command in re.split(r'&&|;|\|', line):
        words = shlex.split(command, comments=True)
        while words and re.fullmatch(r'[A-Z_]+=.*', words[0]):
          words.pop(0)
        if words:
          yield words
