"""The machine: what its GPUs can run, asked without needing one."""
