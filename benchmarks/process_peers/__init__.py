"""What all-reduces between processes: ours, the peers, and limits.

Nothing is imported here: a worker with torch may have no TensorFlow, and the
other way round.
"""
