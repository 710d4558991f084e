"""Replicas on the devices of one host that share one copy of the variables."""
