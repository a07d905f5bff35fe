"""From a profile and a budget to a plan, and to curves over budgets and batch sizes."""
