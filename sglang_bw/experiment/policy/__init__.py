"""The engine's adaptive policies, driven without the engine.

A :class:`~sglang_bw.experiment.policy.trace.Trace` says what rounds cost and what is accepted, a driver plays it round
by round as the scheduler would, and the policy under test is the engine's own module. What is scored is expected time,
so that the draws of one run decide only what the policy sees.
"""
