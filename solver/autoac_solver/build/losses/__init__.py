"""Cross entropies of a step: which are lean, and which may be computed over chunks of rows."""
