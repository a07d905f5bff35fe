"""A training step becomes a `Profile`."""
