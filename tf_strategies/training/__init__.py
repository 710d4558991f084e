"""The loop around the loop: training that survives what happens to workers."""
