"""Manifests are valid according to the real definitions."""

import importlib.util

import pytest
from absl.testing import absltest, parameterized

from tests.kubernetes import structural
from tf_strategies import kubernetes

_JOBS = (
  {},
  {'num_workers': 2, 'num_ps': 2, 'evaluator': True, 'gpus_per_worker': 1},
  {'chief': True, 'secret_name': 'ours'},
  {'num_workers': 2, 'num_ps': 1, 'checkpoint_pvc': 'ck', 'max_restarts': 0},
)
_COMMAND = ['python', '-m', 'train', '--a=$(b) c']
_DEFINITIONS = {
  'tfjob': ('kubeflow.org_tfjobs.yaml', 'v1'),
  'jobset': ('jobsets.yaml', 'v1alpha2'),
}
# The relevant part of the spec in kubeflow/trainer,
# pkg/apis/trainer/v1alpha1/trainjob_types.go. The full definition contains
# whole pods and would be too large.
_NAME = {'type': 'string', 'minLength': 1, 'maxLength': 253}
_TRAIN_JOB = {
  'type': 'object',
  'required': ['runtimeRef'],
  'properties': {
    'runtimeRef': {
      'type': 'object',
      'required': ['name'],
      'properties': {'name': _NAME, 'apiGroup': _NAME, 'kind': _NAME},
    },
    **{'initializer': {}, 'trainer': {}, 'runtimePatches': {}},
    **{'suspend': {'type': 'boolean'}, 'managedBy': _NAME},
  },
}
_HAS_DEFINITIONS = (
  structural.directory() is not None
  and importlib.util.find_spec('yaml') is not None
  and importlib.util.find_spec('jsonschema') is not None
)


def _job(kind, **options):
  options = kubernetes.Options(image='mnist:1', name='mnist', **options)
  return kubernetes.documents(kind, options, _COMMAND)[-1]


@pytest.mark.skipif(
  not _HAS_DEFINITIONS,
  reason='TFS_CRD_DIR is not a directory of CustomResourceDefinitions',
)
class DefinitionTest(parameterized.TestCase):
  @parameterized.product(kind=list(_DEFINITIONS), options=_JOBS)
  def test_job_is_valid(self, kind, options):
    found = structural.problems(_job(kind, **options), _schema(kind))
    self.assertEmpty(found, '\n'.join(found))


@pytest.mark.skipif(
  importlib.util.find_spec('jsonschema') is None, reason='no jsonschema'
)
class TrainJobTest(parameterized.TestCase):
  @parameterized.parameters(*_JOBS)
  def test_train_job_creates_the_jobset(self, **options):
    options = {**options, 'secret_name': 'ours'}
    options = kubernetes.Options(image='mnist:1', name='mnist', **options)
    [jobset] = kubernetes.documents('jobset', options, _COMMAND)
    runtime, job = kubernetes.documents('trainjob', options, _COMMAND)
    for document, kind in ((runtime, 'TrainingRuntime'), (job, 'TrainJob')):
      self.assertEqual(document['kind'], kind)
      self.assertEqual(document['apiVersion'], 'trainer.kubeflow.org/v1alpha1')
      # Pods find each other by this name, and need one namespace.
      self.assertEqual(document['metadata'], jobset['metadata'])
    self.assertEmpty(structural.problems(job['spec'], _TRAIN_JOB))
    self.assertEqual(runtime['spec'], {'template': {'spec': jobset['spec']}})
    self.assertEqual(
      job['spec']['runtimeRef'],
      {
        'apiGroup': runtime['apiVersion'].partition('/')[0],
        'kind': runtime['kind'],
        'name': runtime['metadata']['name'],
      },
    )


_schemas = {}


def _schema(kind):
  # Reading a schema takes half a second.
  if kind not in _schemas:
    _schemas[kind] = structural.schema(*_DEFINITIONS[kind])
  return _schemas[kind]


if __name__ == '__main__':
  absltest.main()
