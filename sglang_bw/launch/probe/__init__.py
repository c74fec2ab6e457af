"""Measurements on the user's own machine: what an all-reduce takes, and what a round of speculation costs."""
