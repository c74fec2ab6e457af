"""Runs in the engine's interpreter, never in the tool's: makes the engine launch its Triton kernels as another GPU.

The engine's own Python functions are called with tensors that have a shape and no memory, in a process that believes
it has one board of the architecture asked for. So block sizes, warps, stages and every constant are what the engine
itself chooses there. Triton compiles each launch down to the cubin with its own ``ptxas``; nothing is run.

Only the standard library, torch, triton and the engine may be imported here.
"""
