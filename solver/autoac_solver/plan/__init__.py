"""Makes plans from a profile and a budget, and curves over budgets and batch sizes."""
