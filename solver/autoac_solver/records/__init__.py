"""What is on disk, and what callers pass: profiles, policies, device tables; files, limits, amounts, errors."""
