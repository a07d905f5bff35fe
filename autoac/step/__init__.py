"""The user's training step and model, and how both are left without a trace."""
