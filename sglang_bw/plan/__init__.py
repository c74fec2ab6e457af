"""Plan a launch: what the engine would decide, whether it fits, whether it runs, whether speculation pays."""
