"""The strategies, one package each, and `registry.create_strategy`."""
