"""What ops and engines cost on this machine."""
