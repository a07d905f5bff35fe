"""Checkpointing strategies on one model, measured side by side, for `autoac compare` and `benchmarks/`.

`workload` (model, sample, loss) and `blocks` (modules to checkpoint one by one) -> `strategies` (by hand), `torch_milp`
(torch's own planner), `ours` (our plans) -> `measure` (peak, gradients, step time) -> `results` -> `table`, `picture`.
`run` does all of these steps. `quiet` reduces noise in the times.
"""
