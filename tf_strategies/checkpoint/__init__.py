"""Checkpoints of a run: positions, model state as arrays, files on disk."""
