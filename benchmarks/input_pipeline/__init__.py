"""Which stage of an input pipeline is the bottleneck; a command, see `__main__`."""
