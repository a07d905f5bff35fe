"""`python -m benchmarks.cuda`: all predictions for a GPU against measurements on one, in one call.

`__main__` (the command) -> `jobs` (the measurements, most important first) -> `training`, `bandwidth` (how) -> `store`
(writes each result at once, so that a second call continues) -> `report` (Markdown and a picture).
"""
