"""Joint work of the ranks of one job: all succeed, or all raise the same error."""
