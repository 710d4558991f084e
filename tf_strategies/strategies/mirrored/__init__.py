"""Replicas on the devices of one host, each with a copy of the variables."""
