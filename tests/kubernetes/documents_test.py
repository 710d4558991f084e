"""Manifests contain the requested options, also through the command."""

import contextlib
import importlib.util
import io
import re
import sys
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tf_strategies import cluster, errors, kubernetes
from tf_strategies.cluster import exit_codes

_ALL = {'num_workers': 3, 'num_ps': 2, 'evaluator': True}
_GPUS = {'limits': {'nvidia.com/gpu': '2'}}
_COMMAND = ['python', '-m', 'train', '--a=$(b) $c $$d']


def _options(**changes):
  return kubernetes.Options(**{'image': 'mnist:1', 'name': 'mnist', **changes})


def _documents(kind, **options):
  return kubernetes.documents(kind, _options(**options), _COMMAND)


def _pod_specs(kind, job):
  """Returns the pod's spec by type of task, for either kind of job."""
  if kind == 'tfjob':
    return {
      replica_type.lower(): replica['template']['spec']
      for replica_type, replica in job['spec']['tfReplicaSpecs'].items()
    }
  return {
    replicated['name']: replicated['template']['spec']['template']['spec']
    for replicated in job['spec']['replicatedJobs']
  }


def _environment(pod, labels, index):
  """Returns a pod's environment variables as its container sees them."""
  found = {'JOB_COMPLETION_INDEX': str(index)}
  for entry in pod['containers'][0]['env']:
    source = entry.get('valueFrom', {})
    if 'fieldRef' in source:
      label = re.fullmatch(
        r"metadata\.labels\['jobset\.sigs\.k8s\.io/(.*)'\]",
        source['fieldRef']['fieldPath'],
      )[1]
      found[entry['name']] = labels[label]
    elif 'value' in entry:
      found[entry['name']] = entry['value']
  return found


class JobKindsTest(parameterized.TestCase):
  @parameterized.parameters('tfjob', 'jobset')
  def test_every_type_of_task_has_its_pods(self, kind):
    _, job = _documents(kind, **_ALL)
    pods = _pod_specs(kind, job)
    self.assertEqual(list(pods), ['chief', 'worker', 'ps', 'evaluator'])
    for pod in pods.values():
      (container,) = pod['containers']
      self.assertEqual(container['name'], 'tensorflow')
      self.assertEqual(container['image'], 'mnist:1')
      self.assertEqual(
        container['ports'], [{'name': 'tfjob-port', 'containerPort': 2222}]
      )
      self.assertEqual(pod['terminationGracePeriodSeconds'], 30)
      # A Service named tfs would set TFS_PORT.
      self.assertIs(pod['enableServiceLinks'], False)
      # Kubernetes turns $$ into $, and does not expand $$(NAME).
      words = container['command']
      self.assertEqual([word.replace('$$', '$') for word in words], _COMMAND)
      self.assertNotIn('$', ''.join(words).replace('$$', ''))

  @parameterized.parameters('tfjob', 'jobset')
  def test_secret_is_random_and_used_by_every_pod(self, kind):
    secrets = set()
    for _ in range(2):
      secret, job = _documents(kind, **_ALL)
      self.assertEqual((secret['apiVersion'], secret['kind']), ('v1', 'Secret'))
      ((key, value),) = secret['stringData'].items()
      self.assertLen(bytes.fromhex(value), 32)
      secrets.add(value)
      self.assertNotIn(value, str(job))
      for pod in _pod_specs(kind, job).values():
        (entry,) = [
          e for e in pod['containers'][0]['env'] if e['name'] == 'TFS_SECRET'
        ]
        self.assertEqual(
          entry['valueFrom']['secretKeyRef'],
          {'name': secret['metadata']['name'], 'key': key},
        )
    self.assertLen(secrets, 2)

  @parameterized.parameters(
    ('tfjob', 0, {'chief': _GPUS, 'worker': _GPUS}),
    ('jobset', 1, {'chief': None, 'worker': _GPUS, 'ps': None}),
  )
  def test_only_tasks_that_compute_gradients_get_gpus(
    self, kind, num_ps, expected
  ):
    job = _documents(kind, chief=True, num_ps=num_ps, gpus_per_worker=2)[-1]
    gpus = {
      task_type: pod['containers'][0].get('resources')
      for task_type, pod in _pod_specs(kind, job).items()
    }
    self.assertEqual(gpus, expected)

  @parameterized.parameters(('tfjob', 2), ('jobset', 0))
  def test_only_tasks_that_use_checkpoints_mount_them(self, kind, num_ps):
    options = {**_ALL, 'chief': True, 'num_ps': num_ps}
    job = _documents(kind, checkpoint_pvc='ck', **options)[-1]
    # With parameter servers, only the chief reads and writes checkpoints.
    servers = ('ps', 'worker') if num_ps else ()
    for task_type, pod in _pod_specs(kind, job).items():
      (container,) = pod['containers']
      if task_type in servers:
        self.assertNotIn('volumes', pod)
        self.assertNotIn('volumeMounts', container)
        continue
      (volume,) = pod['volumes']
      self.assertEqual(volume['persistentVolumeClaim'], {'claimName': 'ck'})
      self.assertEqual(
        container['volumeMounts'],
        [{'name': volume['name'], 'mountPath': '/checkpoints'}],
      )


class TFJobTest(absltest.TestCase):
  @pytest.mark.smoke
  def test_restarts_by_exit_code(self):
    job = _documents('tfjob', **_ALL)[-1]
    for replica in job['spec']['tfReplicaSpecs'].values():
      self.assertEqual(replica['restartPolicy'], 'ExitCode')
      # The operator overrides it and prints a warning.
      self.assertNotIn('restartPolicy', replica['template']['spec'])
    self.assertEqual(
      job['spec']['runPolicy'],
      {'cleanPodPolicy': 'Running', 'backoffLimit': 21},
    )

  @pytest.mark.smoke
  def test_success_policy_depends_on_the_tasks(self):
    policies = [
      _documents('tfjob', **options)[-1]['spec']['successPolicy']
      for options in ({'num_workers': 2}, {'chief': True}, {'num_ps': 1})
    ]
    self.assertEqual(policies, ['AllWorkers', '', ''])


class JobSetTest(absltest.TestCase):
  @pytest.mark.smoke
  def test_all_pods_read_the_same_cluster(self):
    job = _documents('jobset', **_ALL)[-1]
    subdomain = job['spec']['network']['subdomain']
    pods = _pod_specs('jobset', job)
    found = {}
    for replicated in job['spec']['replicatedJobs']:
      self.assertEqual(replicated['replicas'], 1)
      task_type = replicated['name']
      spec = replicated['template']['spec']
      self.assertEqual(spec['completionMode'], 'Indexed')
      self.assertEqual(spec['completions'], spec['parallelism'])
      for index in range(spec['completions']):
        labels = {
          'jobset-name': job['metadata']['name'],
          'replicatedjob-name': task_type,
          'job-index': '0',
        }
        config = cluster.ClusterConfig.from_env(
          _environment(pods[task_type], labels, index)
        )
        self.assertEqual(
          (config.task_type, config.task_index), (task_type, index)
        )
        self.assertEqual(
          config.address, f'mnist-{task_type}-0-{index}.{subdomain}:2222'
        )
        found[config.address] = config.jobs
    self.assertLen(found, 7)
    for jobs in found.values():
      self.assertEqual({a for j in jobs.values() for a in j}, set(found))

  def test_only_permanent_exit_codes_fail_the_job(self):
    job = _documents('jobset', num_workers=4, max_restarts=2)[-1]
    (replicated,) = job['spec']['replicatedJobs']
    spec = replicated['template']['spec']
    self.assertEqual(spec['backoffLimit'], 8)
    ignore, fail = spec['podFailurePolicy']['rules']
    self.assertEqual(ignore['action'], 'Ignore')
    self.assertEqual(fail['action'], 'FailJob')
    values = fail['onExitCodes']['values']
    self.assertEqual(tuple(values), exit_codes.PERMANENT_EXIT_CODES)
    # Kubernetes requires both.
    self.assertEqual(values, sorted(set(values) - {0}))
    self.assertEqual(spec['template']['spec']['restartPolicy'], 'Never')
    (rule,) = job['spec']['failurePolicy']['rules']
    self.assertEqual(rule['onJobFailureReasons'], ['PodFailurePolicy'])

  def test_success_policy_depends_on_the_tasks(self):
    targets = [
      _documents('jobset', **options)[-1]['spec']['successPolicy']
      for options in (
        {'num_workers': 2}, {'chief': True, 'evaluator': True}, _ALL,
      )
    ]  # fmt: skip
    self.assertEqual(
      [target['targetReplicatedJobs'] for target in targets],
      [['worker'], ['chief', 'worker'], ['chief']],
    )


class RefusedOptionsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('image_space', {'image': 'a b'}, "--image='a b'"),
    ('name_long', {'name': 'a' * 64}, '63'),
    ('pod_long', {'name': 'a' * 50}, 'names of 67 letters'),
    ('many', {'num_workers': 10**6}, '1000000'),
  )
  def test_invalid_option_is_named(self, changes, words):
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      _options(**changes)
    self.assertIn(words, str(caught.exception))
    self.assertIn('Fix: ', str(caught.exception))


_JOB = ['--num_workers=2', '--num_ps=1', '--image=mnist:1', '--name=mnist']
_WORDS = ['--', 'python', 'train.py', '--', '--epochs=2']
_needs_yaml = pytest.mark.skipif(
  importlib.util.find_spec('yaml') is None, reason='PyYAML is missing'
)


def _run(*arguments):
  """Returns the exit status, stdout and stderr of the command."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = kubernetes.main(['kubernetes', *arguments])
  return status, out.getvalue(), err.getvalue()


def _read(text):
  import yaml

  return list(yaml.safe_load_all(text))


@_needs_yaml
class WriteTest(parameterized.TestCase):
  @parameterized.parameters(('tfjob', 'TFJob'), ('jobset', 'JobSet'))
  def test_yaml_contains_the_requested_job(self, kind, name):
    status, out, err = _run(*_JOB, f'--kind={kind}', *_WORDS)
    self.assertEqual((status, err), (0, ''))
    secret, job = _read(out)
    self.assertEqual((secret['kind'], job['kind']), ('Secret', name))
    self.assertEqual(job['metadata'], {'name': 'mnist'})
    self.assertIn('out of version control', out.splitlines()[0])
    # YAML would write a list that two pods share as an anchor.
    self.assertNotIn('&id', out)
    self.assertIn('- --epochs=2\n', out)

  def test_existing_secret_is_not_written(self):
    status, out, _ = _run(*_JOB, '--secret_name=ours', *_WORDS)
    self.assertEqual(status, 0)
    self.assertLen(_read(out), 1)
    self.assertNotIn('version control', out)

  @pytest.mark.smoke
  def test_runs_as_a_module(self):
    done = processes.run_python(
      *('-m', 'tf_strategies.kubernetes', *_JOB, *_WORDS), is_checked=True
    )
    self.assertEqual(_read(done.stdout)[1]['kind'], 'JobSet')


class CommandLineTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('no_image', ['--', 'true'], '--image=None'),
    ('no_command', _JOB, 'an empty command'),
    ('kind', [*_JOB, '--kind=pod', '--', 'true'], "--kind='pod'"),
  )
  @_needs_yaml
  def test_invalid_command_line_is_explained(self, arguments, words):
    status, out, err = _run(*arguments)
    self.assertEqual((status, out), (2, ''))
    self.assertIn(words, err)
    self.assertIn('Usage: kubernetes', err)

  def test_missing_yaml_names_the_extra(self):
    with mock.patch.dict(sys.modules, yaml=None):
      status, out, err = _run(*_JOB, *_WORDS)
    self.assertEqual((status, out), (2, ''))
    self.assertIn("'.[manifests]'", err)


if __name__ == '__main__':
  absltest.main()
