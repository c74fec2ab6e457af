"""The parts of two_gpus.py."""
