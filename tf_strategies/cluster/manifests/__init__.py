"""Kubernetes manifests of a job: `python -m tf_strategies.manifests`.

`options` says what is wanted, `pods` is one task's pod, `tfjob` and `jobset` put
pods together, `assembly` adds the secret that the tasks share. Everything is plain dictionaries and lists, as YAML and JSON have them.

Example:

  >>> from tf_strategies.cluster import manifests
  >>> options = manifests.Options(image='mnist:1', num_workers=2)
  >>> documents = manifests.documents('jobset', options, ['python', 'train.py'])
  >>> [document['kind'] for document in documents]
  ['Secret', 'JobSet']
"""

from tf_strategies.cluster.manifests.assembly import KINDS, documents
from tf_strategies.cluster.manifests.options import Options
from tf_strategies.cluster.manifests.tfjob import check_tfjob

__all__ = ['KINDS', 'Options', 'check_tfjob', 'documents']
