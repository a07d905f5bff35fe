"""Properties of torch's ops, read from their schemas, and signatures of their calls."""
