"""Calibration by measurement: engine costs in the user's own model, and a device's cost table."""
