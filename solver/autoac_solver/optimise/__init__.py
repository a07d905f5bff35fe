"""Plans for a problem: the integer program, the search around it, and the greedy plan it has to beat."""
