"""One line in a loop: the first training step is recorded as it runs, and the next ones run under a plan.

`start.auto` checks the arguments and puts the handle on the model. `handle.Auto` receives the loop's events: calls of
the model (`ahead`: of a sharded model, before FSDP2's hooks) and optimizer steps. `cycle` decides which of them belong
to one step. `loop_plan.LoopPlan` makes the plan, puts it on and takes it off; `across` settles on it with other ranks.
`recording` records steps, `optimizers` counts the memory of the loop's optimizers, `beside` runs a step that calls all
modules, `watch` detects steps that the plan was not made for, `measured` measures planned steps, `compiling` compiles
the regions for engine compile, `wanted` has the arguments, and `report` the texts.

NOTE [ The loop's steps ]
  1. Nothing is run for the plan. The loop's own first step is recorded (see `autoac.record.live`), with its batch,
     autocast, loss, micro-batches, gradient scaling and clipping.
  2. A step ends just before an optimizer steps that has a parameter of the model; with a closure, after the closure's
     first run. If no torch optimizer is seen, it ends before the first write to a parameter after backward, or before
     the next call of the model that finds no gradients although backward had left some. So a loop that only
     accumulates, and neither steps nor clears gradients, has no second step. Once an optimizer has stepped, only
     optimizers end steps: two calls before one backward, an inner gradient (MAML) and weights that are perturbed for a
     second backward (SAM) are parts of one. A step that ended otherwise before that is recorded anew.
  3. The plan is made when the next step begins. Only then do we know which tensors of the previous step the loop still
     holds (its output, its loss), and whether a step begins with gradients. If the recorded step differs in that (for
     example if `zero_grad` comes after forward), the next step is recorded instead.
  4. If several optimizers step in turn, their steps are taken as one, see NOTE [ Several optimizers ] in `cycle`.
  5. Only calls of the model in train mode and with gradients enabled count.
"""

from autoac.automatic.handle import Auto
from autoac.automatic.start import auto

__all__ = ["Auto", "auto"]
