"""The objects of a job on Kubernetes: a Secret, and a JobSet, TrainJob or TFJob.

A JobSet (jobset.x-k8s.io/v1alpha2) is one Indexed Job a type of task. Nothing
writes a TF_CONFIG there: a pod learns from the downward API which job and which
pod it is, and from TFS_NUM_WORKERS and its like how many there are;
`ClusterConfig.from_env` puts these together (`cluster.sources.kubernetes`). A pod
that ends with one of `exit_codes.PERMANENT_EXIT_CODES` fails the JobSet at once;
any other status, or an eviction, starts a new pod of the same index. When the
tasks that train have ended well the JobSet is done, and its controller ends
parameter servers and evaluator; for the last checkpoint the evaluator has the
pod's grace period, and 20 seconds at most (`cluster.run_task`).

A TrainJob (trainer.kubeflow.org/v1alpha1) is of Kubeflow Trainer, which makes a JobSet
of its name from a TrainingRuntime. The one written here holds all of the JobSet; without
the label of a step of Trainer's, no field of the TrainJob changes how many tasks there are.

A TFJob (kubeflow.org/v1) is of Kubeflow's training operator, which gives each task
its TF_CONFIG and restarts it by its exit status. It is in maintenance (release
1.9); Kubeflow Trainer is its successor.
"""

import secrets
from collections.abc import Sequence
from typing import Any

from tf_strategies import option_checks
from tf_strategies.cluster import exit_codes
from tf_strategies.cluster import job as job_lib
from tf_strategies.kubernetes import options as options_lib
from tf_strategies.kubernetes import tfjob_check

KINDS = ('tfjob', 'jobset', 'trainjob')

_TRAINER = 'trainer.kubeflow.org'
_SECRET_KEY = 'secret'
_VOLUME = 'checkpoints'
_REPLICA_TYPES = {
  'chief': 'Chief',
  'worker': 'Worker',
  'ps': 'PS',
  'evaluator': 'Evaluator',
}
# Kubernetes itself sets JOB_COMPLETION_INDEX.
_FROM_LABELS = {
  'JOBSET_NAME': 'jobset-name',
  'REPLICATED_JOB_NAME': 'replicatedjob-name',
  'JOB_INDEX': 'job-index',
}


def documents(
  kind: str, options: options_lib.Options, command: Sequence[str]
) -> list[dict[str, Any]]:
  """All objects in the order to create them: the Secret, unless one exists; the job.

  Args:
    kind: one of `KINDS`.
    options: of the job.
    command: program and arguments, the same for every task.

  Raises:
    UnsupportedOptionError: the kind is another one, the command is empty, or a
      JobSet is to have a restart policy that it cannot have.

  Example:

    >>> shared = options_lib.Options(image='mnist:1', secret_name='ours')
    >>> [document['kind'] for document in documents('tfjob', shared, ['train'])]
    ['TFJob']
  """
  option_checks.check(
    kind in KINDS,
    f'--kind={kind}',
    f'one of {", ".join(KINDS)}',
    'pass --kind=jobset, or --kind=trainjob where Kubeflow Trainer runs',
  )
  option_checks.check(
    bool(command),
    'an empty command',
    'a program and its arguments',
    'write it after a lone --',
  )
  option_checks.check(
    kind == 'tfjob' or options.restart_policy == 'ExitCode',
    f'--restart_policy={options.restart_policy} with --kind={kind}',
    'ExitCode, by which a JobSet restarts',
    'leave it out; --max_restarts=0 means that nothing is started again',
  )
  if kind == 'tfjob':
    jobs = [_tfjob(options, command)]
  else:
    jobs = [_jobset(options, command)]
  if kind == 'trainjob':
    jobs = _trainjob(options, jobs[0])
  return jobs if options.secret_name else [_secret(options), *jobs]


def _tfjob(
  options: options_lib.Options, command: Sequence[str]
) -> dict[str, Any]:
  counts = options.job.all_counts
  job = {
    'apiVersion': tfjob_check.API_VERSION,
    'kind': 'TFJob',
    'metadata': _metadata(options, options.name),
    'spec': {
      # Without a chief the job would end with worker 0, and end the others.
      'successPolicy': '' if counts['chief'] else 'AllWorkers',
      'runPolicy': {
        # Parameter servers do not end by themselves.
        'cleanPodPolicy': 'Running',
        'backoffLimit': options.max_restarts * sum(counts.values()),
      },
      'tfReplicaSpecs': {
        _REPLICA_TYPES[task_type]: {
          'replicas': count,
          'restartPolicy': options.restart_policy,
          'template': {'spec': _pod(options, task_type, command)},
        }
        for task_type, count in counts.items()
        if count
      },
    },
  }
  tfjob_check.check_tfjob(job)
  return job


def _jobset(
  options: options_lib.Options, command: Sequence[str]
) -> dict[str, Any]:
  present = [t for t, count in options.job.all_counts.items() if count]
  trains = [t for t in present if t in options.job.training_types]
  return {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': _metadata(options, options.name),
    'spec': {
      'network': {
        'enableDNSHostnames': True,
        # Tasks look for each other before they are ready.
        'publishNotReadyAddresses': True,
        'subdomain': options.name,
      },
      'successPolicy': {'operator': 'All', 'targetReplicatedJobs': trains},
      'failurePolicy': {
        # Each Job starts its own pods again; when it gives up, so does the set.
        'maxRestarts': 0,
        'rules': [
          {
            'name': 'permanent',
            'action': 'FailJobSet',
            'onJobFailureReasons': ['PodFailurePolicy'],
          }
        ],
      },
      'replicatedJobs': [
        {
          'name': task_type,
          'replicas': 1,
          'template': {'spec': _indexed_job(options, task_type, command)},
        }
        for task_type in present
      ],
    },
  }


def _trainjob(
  options: options_lib.Options, jobset: dict[str, Any]
) -> list[dict[str, Any]]:
  """The runtime that holds a JobSet, and the TrainJob that makes it one."""
  runtime = {'apiGroup': _TRAINER, 'kind': 'TrainingRuntime'}
  specs = {
    runtime['kind']: {'template': {'spec': jobset['spec']}},
    'TrainJob': {'runtimeRef': {**runtime, 'name': options.name}},
  }
  return [
    {
      'apiVersion': f'{_TRAINER}/v1alpha1',
      'kind': kind,
      'metadata': _metadata(options, options.name),
      'spec': spec,
    }
    for kind, spec in specs.items()
  ]


def _indexed_job(
  options: options_lib.Options, task_type: str, command: Sequence[str]
) -> dict[str, Any]:
  counts = options.job.all_counts
  count = counts[task_type]
  told = {
    'TFS_NUM_WORKERS': counts['worker'],
    'TFS_NUM_PS': counts['ps'],
    'TFS_CHIEF': counts['chief'],
    'TFS_EVALUATOR': counts['evaluator'],
    'TFS_PORT': tfjob_check.PORT,
    'TFS_SUBDOMAIN': options.name,
  }
  environment = [_variable(name, str(value)) for name, value in told.items()]
  for name, label in _FROM_LABELS.items():
    path = f"metadata.labels['jobset.sigs.k8s.io/{label}']"
    source = {'fieldRef': {'fieldPath': path}}
    environment.append({'name': name, 'valueFrom': source})
  pod = _pod(options, task_type, command, environment)
  return {
    'completionMode': 'Indexed',
    'completions': count,
    'parallelism': count,
    'backoffLimit': options.max_restarts * count,
    'podFailurePolicy': {
      'rules': [
        # An eviction is nobody's fault, and does not count.
        {
          'action': 'Ignore',
          'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}],
        },
        {
          'action': 'FailJob',
          'onExitCodes': {
            'containerName': tfjob_check.CONTAINER,
            'operator': 'In',
            'values': list(exit_codes.PERMANENT_EXIT_CODES),
          },
        },
      ]
    },
    # A podFailurePolicy needs Never: the Job makes new pods.
    'template': {'spec': {'restartPolicy': 'Never', **pod}},
  }


def _pod(
  options: options_lib.Options,
  task_type: str,
  command: Sequence[str],
  environment: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
  """What runs in the pods of one type of task, with further variables."""
  secret = {'name': _secret_name(options), 'key': _SECRET_KEY}
  # A server that was evicted is not one that has done its work.
  terminated = str(exit_codes.RESTARTABLE_EXIT_CODE)
  container: dict[str, Any] = {
    'name': tfjob_check.CONTAINER,
    'image': options.image,
    # Kubernetes would expand $(NAME), and takes $$ for $.
    'command': [word.replace('$', '$$') for word in command],
    'env': [
      _variable('PYTHONUNBUFFERED', '1'),
      # A checkpoint directory is that of one job, however often it is applied.
      _variable('TFS_RUN_ID', options.name),
      _variable(exit_codes.TERMINATED_VARIABLE, terminated),
      {'name': 'TFS_SECRET', 'valueFrom': {'secretKeyRef': secret}},
      *environment,
    ],
    'ports': [
      {'name': tfjob_check.PORT_NAME, 'containerPort': tfjob_check.PORT}
    ],
  }
  pod: dict[str, Any] = {
    'terminationGracePeriodSeconds': options.grace_period,
    # Variables that describe the namespace's Services: one that is called tfs
    # would set TFS_PORT.
    'enableServiceLinks': False,
    'containers': [container],
  }
  # With parameter servers the chief only hands out steps.
  computes = ('worker',) if options.num_ps else ('chief', 'worker')
  if options.gpus_per_worker and task_type in computes:
    limits = {'nvidia.com/gpu': str(options.gpus_per_worker)}
    container['resources'] = {'limits': limits}
  # A claim that one node at a time may mount would keep others from starting.
  mounts = (*options.job.training_types, 'evaluator')
  if options.checkpoint_pvc and task_type in mounts:
    container['volumeMounts'] = [
      {'name': _VOLUME, 'mountPath': options.checkpoint_path}
    ]
    claim = {'claimName': options.checkpoint_pvc}
    pod['volumes'] = [{'name': _VOLUME, 'persistentVolumeClaim': claim}]
  return pod


def _secret(options: options_lib.Options) -> dict[str, Any]:
  """A Secret with new random data, which `TFS_SECRET` of the pods names."""
  return {
    'apiVersion': 'v1',
    'kind': 'Secret',
    'metadata': _metadata(options, _secret_name(options)),
    'type': 'Opaque',
    'stringData': {_SECRET_KEY: secrets.token_hex(job_lib.SECRET_BYTES)},
  }


def _secret_name(options: options_lib.Options) -> str:
  return options.secret_name or f'{options.name}-secret'


def _metadata(options: options_lib.Options, name: str) -> dict[str, Any]:
  if options.namespace is None:
    return {'name': name}
  return {'name': name, 'namespace': options.namespace}


def _variable(name: str, value: str) -> dict[str, str]:
  return {'name': name, 'value': value}
