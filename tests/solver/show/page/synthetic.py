"""A recorded step of a decoder of any size, without running one, and plans for it without solving."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pandas as pd

from autoac_solver.build.build import build
from autoac_solver.build.stacking import Stacked
from autoac_solver.plan.planning import make_record, named_calls
from autoac_solver.problem.simulator import Simulator
from autoac_solver.problem.solution import Solution
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import ModuleCall, Op, Profile, Saved, Storage
from tests.solver.generators import LAYER, MIB

MODULES = {0: "input_norm", 7: "attention", 21: "post_norm", 28: "mlp"}
"""The first of the ops in `LAYER` that belong to each module of a layer."""


def decoder_profile(
    layers: int = 80, *, helpers: int = 2, backward: int = 8, model: str = "Decoder", prefix: str = "layers."
) -> Profile:
    """A step of `layers` layers in the shape of a 70B Llama, (34 * (1 + helpers + backward) + 1) * layers + 1 ops.

    Args:
        helpers: ops in forward before each of a layer's 34, whose output dies at once.
        backward: ops for each of the 34 in backward.
        model, prefix: names.
    """
    return _Recorder(model).record(layers, helpers, backward, prefix)


def plans_by_share(profile: Profile, shares: list[float], engine: str = "replay") -> list[PlanRecord]:
    """Plans that recompute whatever they may in the first so many of the layers, by budget, ascending."""
    names = sorted({call.fqn for call in profile.calls if call.fqn and call.parent == 0})
    built = build(profile, named_calls(profile, names), engine)
    groups = built.problem.groups
    records = []
    for share in shares:
        until = round(share * len(built.regions))
        again = [group.region < until and not group.must_save for group in groups]
        timeline = Simulator(built.problem).simulate(again)
        solution = Solution(
            decisions=tuple(map(int, again)),
            peak_bytes=timeline.peak_bytes,
            extra_s=timeline.extra_s,
            bound_s=0.9 * timeline.extra_s,
            gap=0.1 * timeline.extra_s / profile.step_s,
            status="feasible",
            solver="none",
            rounds=0,
            solve_s=0.0,
        )
        records.append(
            make_record(profile, Stacked(built, (), ()), solution, timeline.peak_bytes + 1, 0, "for a test")
        )
    return sorted(records, key=lambda record: record.budget_bytes)


@dataclasses.dataclass(frozen=True)
class Curve:
    """As much of a `Tradeoff` as the page looks at."""

    plans: Sequence[Any]
    frame: pd.DataFrame = dataclasses.field(default_factory=pd.DataFrame)
    baselines: pd.DataFrame | None = None
    knee: int | None = None


def tradeoff(plans: Sequence[Any], **more: Any) -> Any:
    """A curve of these plans. A real one takes solving."""
    return Curve(plans, **more)


class _Recorder:
    def __init__(self, model: str) -> None:
        self.model = model
        self.clock = 0
        self.tape: list[Op] = []
        self.storages: list[list] = []  # bytes, alloc, free, kind, name
        self.saved: list[list] = []  # storage, module, tick, unpacked, released
        self.calls: list[list] = []  # fqn, parent, start, end, input

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def op(self, name: str, module: int, reads: tuple[int, ...], mib: float, us: float, kind: str) -> int:
        """An op with one output; the output's index."""
        self.storages.append([round(mib * MIB), self.tick(), -1, kind, ""])
        made = len(self.storages) - 1
        self.tape.append(Op(name, self.clock, module, kind != "Activation", us * 1e-6, reads, (), (made,)))
        return made

    def free(self, storage: int) -> None:
        self.storages[storage][2] = self.tick()

    def enter(self, fqn: str, parent: int, *inputs: int) -> int:
        self.calls.append([fqn, parent, self.tick(), -1, inputs])
        return len(self.calls) - 1

    def leave(self, call: int) -> None:
        self.calls[call][3] = self.tick()

    def record(self, layers: int, helpers: int, backward: int, prefix: str) -> Profile:
        for layer in range(layers):
            name = f"{prefix}{layer}.weight"
            self.storages.append([200 * MIB, -1, -1, "Parameter", name])
        self.storages.append([64 * MIB, -1, -1, "Input", ""])
        flow = layers
        root = self.enter("", -1, flow)
        done = []
        for layer in range(layers):
            made, saves = self.forward(f"{prefix}{layer}", root, flow, layer, helpers)
            done.append((made, saves))
            flow = made[-1]
        self.leave(root)
        gradient = self.op("aten.nll_loss_backward.default", -1, (flow,), 64, 500, "Temp")
        for layer in reversed(range(layers)):
            made, saves = done[layer]
            gradient = self.backward(made, saves, gradient, layer, backward)
        self.free(gradient)
        end = self.tick()
        return Profile(
            model=self.model,
            model_fingerprint="0" * 16,
            op_fingerprint="1" * 16,
            device="cpu",
            device_bytes=0,
            torch_version="2.13.0",
            end=end + 1,
            tape=tuple(self.tape),
            storage_table=tuple(
                Storage(b, alloc, end if free < 0 else free, kind, name)
                for b, alloc, free, kind, name in self.storages
            ),
            saved=tuple(Saved(s, m, t, u, r, r) for s, m, t, u, r in self.saved),
            calls=tuple(
                ModuleCall(f, 0, p, "Module", True, start, stop, i) for f, p, start, stop, i in self.calls
            ),
            sources={"Module": "model.py:12"},
        )

    def forward(
        self, name: str, root: int, flow: int, weight: int, helpers: int
    ) -> tuple[list[int], list[list[list]]]:
        """The storages that a layer's ops make, and what autograd saved for each op."""
        call = module = self.enter(name, root, flow)
        made: list[int] = []
        saves: list[list[list]] = []
        for index, op in enumerate(LAYER):
            if index in MODULES:
                if module != call:
                    self.leave(module)
                module = self.enter(f"{name}.{MODULES[index]}", call, made[-1] if made else flow)
            reads = tuple(flow if source < 0 else made[source] for source in op.reads)
            for _ in range(helpers):
                self.free(
                    self.op("aten.mul.Tensor", module, (reads[0],), op.mib / 2, op.us / 10, "Activation")
                )
            heavy = op.us > 1000
            kernel = "aten.mm.default" if heavy else "aten.add.Tensor"
            made.append(
                self.op(kernel, module, (*reads, weight) if heavy else reads, op.mib, op.us, "Activation")
            )
            for source in dict.fromkeys(op.reads):
                if source >= 0 and max(i for i, o in enumerate(LAYER) if source in o.reads) == index:
                    self.free(made[source])
            mine = [i for i in range(index + 1) if index in LAYER[i].saved_by]
            saves.append([[made[i], module, self.tick(), -1, -1] for i in mine])
            self.saved += saves[-1]
        self.leave(module)
        self.leave(call)
        return made, saves

    def backward(self, made: list[int], saves: list[list[list]], gradient: int, layer: int, ops: int) -> int:
        """Ops in the reverse order; gives back the gradient of the layer's input."""
        for index in reversed(range(len(LAYER))):
            module = self.module_of(layer, index)
            for saved in saves[index]:
                saved[3] = self.tick()
            for _ in range(ops):
                reads = (gradient, *(saved[0] for saved in saves[index]))
                new = self.op(
                    "aten.mul.Tensor", module, reads, LAYER[index].mib, 2 * LAYER[index].us / ops, "Temp"
                )
                self.free(gradient)
                gradient = new
            for saved in saves[index]:
                saved[4] = self.tick()
        self.op("aten.mm.default", self.module_of(layer, 0), (gradient,), 200, 100, "Gradient")
        self.free(made[-1])  # the output's last reader is the next layer, whose backward is past
        return gradient

    def module_of(self, layer: int, index: int) -> int:
        """The call that the op with this index of the layer ran in."""
        return (
            1 + layer * (1 + len(MODULES)) + max(i for i, first in enumerate(MODULES) if first <= index) + 1
        )
