"""What torch's ops are and do, read from their schemas; what a call of one is told from others by."""
