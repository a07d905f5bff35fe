"""Measured costs of ops and engines on this machine."""
