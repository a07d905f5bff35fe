"""Benchmarks that anyone can run; none is part of the package.

`python -m benchmarks.compare` compares plans with other checkpointing strategies, at ten budgets, on three models:
`models` -> `autoac.compare` (strategies, measurement, results) -> `checks` -> `report`. With `--rounds 6 --more 5` it
took 39 minutes; torch's `sac_milp` takes part if `pwlf` is installed. `autoac compare` does the same for your model.

`python -m benchmarks.op_cost` measures the time per op under each engine; it takes seconds.

`python -m benchmarks.loops` runs common training loops with and without a plan, and makes the docs' table of weights,
peaks and predictions; it takes two minutes and needs the trainers' libraries.

`python -m benchmarks.cuda` compares all predictions for a GPU with measurements on one, in eight minutes.

Noise is reduced as follows (see `autoac.compare.quiet`): CPU time instead of wall-clock time; one thread, since with
more threads CPU time is not the time of a step (they sleep while they wait, and the engine's bookkeeping runs on one);
freed memory stays in the process; all configurations take turns in random order; each sample is divided by those
beside it; the median of these counts.
"""
