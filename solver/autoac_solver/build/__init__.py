"""From a profile, a choice of regions and an engine to the problem that is solved."""
