"""Tables and plots of data frames, for notebooks and pages; independent of plans."""
