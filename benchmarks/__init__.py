"""Benchmarks that anyone can run; none is part of the package.

`python -m benchmarks.compare` holds our plans against what people do today, at ten budgets, on three models: `models`
-> `autoac.compare` (strategies, measurement, results) -> `checks` -> `report`. With `--rounds 6 --more 5` it took 39
minutes; torch's `sac_milp` takes part if `pwlf` is installed. `autoac compare` does the same for a model of your own.

`python -m benchmarks.op_cost` measures what the engines' bookkeeping costs per op; it takes seconds.

`python -m benchmarks.loops` trains the loops that people have, with and without a plan, and makes the docs' table of
weights, peaks and predictions; it takes two minutes and the trainers' libraries.

`python -m benchmarks.cuda` holds all that is predicted for a GPU against what is measured on one, in eight minutes.

What keeps them quiet (see `autoac.compare.quiet`): CPU time instead of the clock on the wall, one thread, since on more
of them CPU time is not the time of a step (they sleep while they wait, and the engine's bookkeeping is done by one),
freed memory kept by the process, all configurations taking turns in random order, each sample held against those beside
it, and of these the median.
"""
