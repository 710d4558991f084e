"""Checks an object strictly against a CustomResourceDefinition.

An API server silently drops unknown fields. Here each unknown field is a
problem, because it is a setting without effect.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any


def directory() -> pathlib.Path | None:
  """Returns the directory of the definitions, or None if this machine has none."""
  text = os.environ.get('TFS_CRD_DIR')
  return pathlib.Path(text) if text else None


def schema(name: str, version: str) -> dict[str, Any]:
  """Returns the schema of a version in the definition in the file `name`."""
  import yaml

  text = (directory() / name).read_text(encoding='utf-8')
  for document in yaml.load_all(
    text, getattr(yaml, 'CSafeLoader', yaml.SafeLoader)
  ):
    if document and document['kind'] == 'CustomResourceDefinition':
      for candidate in document['spec']['versions']:
        if candidate['name'] == version:
          whole = dict(candidate['schema']['openAPIV3Schema'])
          properties = dict(whole['properties'])
          # The API server itself defines the object's metadata.
          properties['metadata'] = {}
          return {**whole, 'properties': properties}
  raise ValueError(f'{name} defines no version {version!r}.')


def problems(value: Any, schema: Mapping[str, Any]) -> list[str]:
  """Returns each error of an object with its path."""
  import jsonschema

  found = jsonschema.Draft7Validator(_closed(schema)).iter_errors(value)
  return [f'{error.json_path}: {error.message}' for error in found]


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the JSON schema without unknown fields."""
  if schema.get('x-kubernetes-int-or-string'):
    return {'type': ['integer', 'string']}
  closed = dict(schema)
  if 'properties' in schema:
    closed['properties'] = {
      n: _closed(s) for n, s in closed['properties'].items()
    }
  if 'items' in schema:
    closed['items'] = _closed(closed['items'])
  if isinstance(schema.get('additionalProperties'), Mapping):
    closed['additionalProperties'] = _closed(closed['additionalProperties'])
  elif schema.get('type') == 'object':
    closed.setdefault('additionalProperties', False)
  if schema.get('x-kubernetes-list-type') in ('map', 'set'):
    closed['uniqueItems'] = True
  return closed
