"""The optimization problem, the simulator that judges decisions, and the solver's result type."""
