"""Deployment files of a launch: what they are made of, and one module for each kind."""
