"""Records on disk and callers' arguments: profiles, plans, policies, device tables; files, limits, units, errors."""
