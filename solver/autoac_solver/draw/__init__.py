"""Tables and pictures of frames, for notebooks and pages; they know nothing of plans."""
