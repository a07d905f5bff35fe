"""The user's training step and model, and restoring them after trial runs."""
