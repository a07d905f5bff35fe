"""Regions compiled and measured: the points that engine compile chooses from, and what a planned step really takes."""
