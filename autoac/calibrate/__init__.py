"""Times that fit the machine: the engines in the user's own model, and a device's cost table."""
