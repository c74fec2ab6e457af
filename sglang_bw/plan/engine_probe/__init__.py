"""Runs in the engine's interpreter: its argument resolution as another machine. Nothing of the tool's environment."""
