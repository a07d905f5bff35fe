"""A plan's record: made from a solution, and turned back into the planned step."""
