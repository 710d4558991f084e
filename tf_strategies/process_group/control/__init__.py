"""The control plane of a group: heartbeats, small exchanges, failures."""
