"""Compiles and measures regions: the points that engine compile chooses from, and the peak of a planned step."""
