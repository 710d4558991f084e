"""Jobs of `strategies`, the program of their tasks, and results."""
