"""Checks an object against a CustomResourceDefinition, strictly.

An API server drops fields that it does not know, unless it is asked not to;
here each is a problem, since a dropped field is a setting that does nothing.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any


def directory() -> pathlib.Path | None:
  """Returns where the definitions are, if this machine has them."""
  text = os.environ.get('TFS_CRD_DIR')
  return pathlib.Path(text) if text else None


def schema(name: str, version: str) -> dict[str, Any]:
  """Returns the schema of a version in the definition that the file `name` holds."""
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
          # The API server itself defines the metadata of the object as a whole.
          properties['metadata'] = {}
          return {**whole, 'properties': properties}
  raise ValueError(f'{name} defines no version {version!r}.')


def problems(value: Any, schema: Mapping[str, Any]) -> list[str]:
  """Returns each mistake of an object with its place; empty if there is none."""
  import jsonschema

  found = jsonschema.Draft7Validator(_closed(schema)).iter_errors(value)
  return [f'{error.json_path}: {error.message}' for error in found]


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a schema of JSON that allows no unknown field."""
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
