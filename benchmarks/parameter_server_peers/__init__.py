"""Peers that train with parameter servers, ours and TensorFlow's, and their tasks."""
