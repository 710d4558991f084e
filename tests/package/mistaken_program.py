"""Typical mistakes, one per line, that a type checker must find.

This program never runs. The type checker must report exactly the lines that end
in `# wrong`.
"""

import tf_strategies as tfs

tfs.RingMiroredStrategy()  # wrong
tfs.RingMirroredStrategy(device=['CPU:0'])  # wrong
tfs.RingMirroredStrategy(devices=4)  # wrong
tfs.MultiWorkerRingStrategy(options='tcp')  # wrong
tfs.RingOptions(bucket_bytes='8 MB')  # wrong
tfs.ParameterServerStrategy(bakup_workers=1)  # wrong
tfs.ParameterServerStrategy(checkpoint_steps='100')  # wrong
tfs.MonitorCallback(time_line='run.json')  # wrong
tfs.elastic.run(lambda job: job.no_such_method())  # wrong
tfs.elastic.run(4)  # wrong
tfs.elastic.run(lambda job: job.fit(None, None, 1, 1, shufle=1))  # wrong
tfs.ScheduledAllReduce('tree', rot=1)  # wrong
tfs.data.PipelineOptions(global_batch_size='64')  # wrong
tfs.data.make_data_set  # wrong  # noqa: B018
tfs.keras.LocalSteps('adam', every='4')  # wrong
tfs.cluster.ClusterConfig.from_envs()  # wrong
tfs.RingMirroredStrategy(devices=['CPU:0'])
