"""`python -m benchmarks.cuda`: all that is predicted for a GPU held against what is measured on one, in one call.

`__main__` (the command) -> `jobs` (what is measured, the most important first) -> `training`, `bandwidth` (how) ->
`store` (each result written as soon as it is there; a second call goes on) -> `report` (Markdown and a picture).
"""
