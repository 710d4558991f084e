"""JobSet, jobset.x-k8s.io/v1alpha2: one Indexed Job a type of task.

Nothing writes a TF_CONFIG there. A pod learns from the downward API which job
and which pod it is, and from TFS_NUM_WORKERS and its like how many there are;
`ClusterConfig.from_env` puts these together (`cluster.sources.kubernetes`).

A pod that ends with one of `exit_codes.PERMANENT_EXIT_CODES` fails the JobSet
at once; any other status, or an eviction, starts a new pod of the same index.
When the tasks that train have ended well the JobSet is done, and its controller
ends parameter servers and evaluator; for the last checkpoint the evaluator has
the pod's grace period, and 20 seconds at most (`cluster.run_task`).

Example:

  >>> from tf_strategies.kubernetes import jobset, options
  >>> job = jobset.jobset(options.Options(image='mnist:1', num_ps=1), ['train'])
  >>> [replicated['name'] for replicated in job['spec']['replicatedJobs']]
  ['chief', 'worker', 'ps']
"""

from collections.abc import Sequence
from typing import Any

from tf_strategies.cluster import exit_codes
from tf_strategies.kubernetes import options as options_lib
from tf_strategies.kubernetes import pods

API_VERSION = 'jobset.x-k8s.io/v1alpha2'

# Kubernetes itself sets JOB_COMPLETION_INDEX.
_FROM_LABELS = {
  'JOBSET_NAME': 'jobset-name',
  'REPLICATED_JOB_NAME': 'replicatedjob-name',
  'JOB_INDEX': 'job-index',
}


def jobset(
  options: options_lib.Options, command: Sequence[str]
) -> dict[str, Any]:
  """A JobSet that runs `command` as every task."""
  counts = options.all_counts
  present = [task_type for task_type, count in counts.items() if count]
  return {
    'apiVersion': API_VERSION,
    'kind': 'JobSet',
    'metadata': pods.metadata(options, options.name),
    'spec': {
      'network': {
        'enableDNSHostnames': True,
        # Tasks look for each other before they are ready.
        'publishNotReadyAddresses': True,
        'subdomain': options.name,
      },
      'successPolicy': {
        'operator': 'All',
        'targetReplicatedJobs': [
          task_type
          for task_type in present
          if task_type in options.job.training_types
        ],
      },
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
          'template': {'spec': _job_spec(options, task_type, command)},
        }
        for task_type in present
      ],
    },
  }


def _job_spec(
  options: options_lib.Options, task_type: str, command: Sequence[str]
) -> dict[str, Any]:
  count = options.all_counts[task_type]
  spec = pods.pod_spec(options, task_type, command, _environment(options))
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
            'containerName': pods.CONTAINER,
            'operator': 'In',
            'values': list(exit_codes.PERMANENT_EXIT_CODES),
          },
        },
      ]
    },
    # A podFailurePolicy needs Never: the Job makes new pods.
    'template': {'spec': {'restartPolicy': 'Never', **spec}},
  }


def _environment(options: options_lib.Options) -> list[dict[str, Any]]:
  counts = options.all_counts
  told = {
    'TFS_NUM_WORKERS': counts['worker'],
    'TFS_NUM_PS': counts['ps'],
    'TFS_CHIEF': counts['chief'],
    'TFS_EVALUATOR': counts['evaluator'],
    'TFS_PORT': pods.PORT,
    'TFS_SUBDOMAIN': options.name,
  }
  return [
    *(pods.variable(name, str(value)) for name, value in told.items()),
    *(
      {
        'name': name,
        'valueFrom': {
          'fieldRef': {
            'fieldPath': f"metadata.labels['jobset.sigs.k8s.io/{label}']"
          }
        },
      }
      for name, label in _FROM_LABELS.items()
    ),
  ]
