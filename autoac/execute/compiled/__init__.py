"""Engine compile: regions are compiled by `torch.compile`, each at the point that the plan chooses."""
