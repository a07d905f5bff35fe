"""Strategies of checkpointing on one model, measured side by side: what `autoac compare` and `benchmarks/` are made of.

`workload` (what is trained) and `blocks` (what people checkpoint one by one) -> `strategies` (by hand), `torch_milp`
(torch's own planner), `ours` (our plans) -> `measure` (peak, gradients, step time) -> `results` -> `table`, `picture`.
`run` is the way through. `quiet` keeps the machine's noise out of the times.
"""
