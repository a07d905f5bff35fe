"""Records a training step as a `Profile`."""
