"""Kubernetes manifests of a job: `python -m tf_strategies.kubernetes`.

Documents are plain dictionaries and lists, as YAML and JSON have them.

Example:

  >>> from tf_strategies import kubernetes
  >>> options = kubernetes.Options(image='mnist:1', num_workers=2)
  >>> documents = kubernetes.documents('jobset', options, ['python', 'train.py'])
  >>> [document['kind'] for document in documents]
  ['Secret', 'JobSet']
"""

from tf_strategies.kubernetes.command import main
from tf_strategies.kubernetes.manifests import KINDS, documents
from tf_strategies.kubernetes.options import Options

__all__ = ['KINDS', 'Options', 'documents', 'main']
