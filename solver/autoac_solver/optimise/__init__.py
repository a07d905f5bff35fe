"""Solvers of a problem: the integer program, the search around it, and the greedy plan as a baseline."""
