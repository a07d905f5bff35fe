"""Programs on a model: the engines that carry a plan out, and what puts them on modules."""
