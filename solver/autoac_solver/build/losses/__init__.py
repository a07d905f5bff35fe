"""Cross entropies of a step: lean ones, and those that may be chunked."""
