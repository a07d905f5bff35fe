"""Simulation of CUDA's caching allocator: its options, its rules, and the order of a step's allocations."""
