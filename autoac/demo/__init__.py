"""`autoac demo`: the main job on real input, compared with the same training without a plan."""
