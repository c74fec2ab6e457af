"""What runs in the engine's interpreter, one process a rank under torchrun; it imports nothing else of the tool."""
