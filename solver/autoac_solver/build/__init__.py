"""Builds the problem from a profile, a choice of regions and an engine."""
