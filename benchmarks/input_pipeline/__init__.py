"""A command that finds the slowest stage of an input pipeline (see `__main__`)."""
