"""The problem in the mathematics' own words, the simulator that judges decisions, and what a solver answers."""
