"""Engine "sac": the decisions as a policy for torch's own selective activation checkpointing."""
