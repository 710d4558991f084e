"""All-reduces between processes: ours, other libraries, and lower limits.

This module imports nothing, because a worker may have torch or TensorFlow only.
"""
