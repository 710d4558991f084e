"""One program for one device, run by several replicas that share its batch.

A step is traced once, as it would run on one device with the whole batch. Each
tensor of the trace is then found to be whole (the same on every replica), split
along the axis of the batch, or a part of a sum; collectives stand where a tensor
is needed otherwise than it is. So the result is one device's for every program:
an operation that is not known here gets the whole batch on every replica.
"""
