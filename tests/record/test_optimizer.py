"""The optimizer's part of the step: its state is resident, and what its `step()` takes is part of the peak."""

import queue
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import autoac
from autoac.measure import measure_peak, unique_storage_bytes
from tests.quantized import Quantized
from tests.small_models import batch, least_bytes, make

pytestmark = pytest.mark.usefixtures("one_thread")

Parameters = Iterable[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "SGD, momentum, foreach": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "Adafactor": torch.optim.Adafactor,
    "ASGD": lambda p: torch.optim.ASGD(p, t0=0),  # begins to average at once
}
LOOK_AT_VALUES = {"Adafactor", "ASGD"}


def train(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """A step from the zero_grad state, with `optimizer.step()` at its end, while output and loss are still there."""
    output = model(x)
    loss = output.mean()
    loss.backward()
    optimizer.step()


def resident_bytes(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    return unique_storage_bytes([*model.parameters(), *model.buffers(), x, *state])


def measured_bytes(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    """Peak of the third step: the first one makes the state, and ASGD begins to average in the third."""
    for _ in range(2):
        train(model, x, optimizer)
        optimizer.zero_grad(set_to_none=True)
    return (
        resident_bytes(model, x, optimizer)
        + measure_peak(lambda: train(model, x, optimizer)).peak_above_start_bytes
    )


@pytest.mark.parametrize("rows", [64, 4])  # the peak is in backward, or in the optimizer
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_peak(name: str, rows: int):
    model, x = make(), batch()[:rows].clone()
    optimizer = OPTIMIZERS[name](model.parameters())
    without = autoac.solve(autoac.profile(model, x), 10**12)
    n_entries = len(optimizer.state)
    profile = autoac.profile(model, x, optimizer=optimizer)
    plan = autoac.solve(profile, 10**12)
    assert len(optimizer.state) == n_entries

    measured = measured_bytes(model, x, optimizer)
    assert profile.resident_bytes == resident_bytes(model, x, optimizer)
    assert plan.predicted_peak_bytes == pytest.approx(measured, rel=1e-3)
    assert plan.predicted_peak_bytes >= without.predicted_peak_bytes
    looks = (
        "; it looks at values, for which 1 and 1386000 stood"
        if type(optimizer).__name__ in LOOK_AT_VALUES
        else ""
    )
    assert (
        profile.notes[-1] == f"includes {type(optimizer).__name__}.step(), whose time is not counted{looks}"
    )
    optstate = profile.storages[profile.storages["kind"] == "Optstate"]
    assert list(optstate["name"]) == [type(optimizer).__name__]


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_workspace_of_matrix_products_and_of_converted_types_counts(nesterov: bool):
    """Muon multiplies matrices in bfloat16; on CPU these products take more inside than their result."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 64, bias=False))
    x = torch.randn(4, 64)
    optimizer = torch.optim.Muon(model.parameters(), nesterov=nesterov)
    before = [p.detach().clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    plan = autoac.solve(autoac.profile(model, x, optimizer=optimizer), 10**12)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, model.parameters(), before))
    assert plan.predicted_peak_bytes == pytest.approx(measured_bytes(model, x, optimizer), rel=1e-3)


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_plan_for_a_budget_that_holds_the_optimizer(engine: str):
    model, x = make(), torch.randn(256, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    profile = autoac.profile(model, x, optimizer=optimizer)
    budget = least_bytes(profile, engine)
    plan = autoac.solve(profile, budget, engine=engine)
    assert any(region.wrapped for region in plan.regions)
    plan.apply(model)
    measured = measured_bytes(model, x, optimizer)
    assert measured <= budget
    assert plan.predicted_peak_bytes == pytest.approx(measured, rel=1e-3)


def test_no_plan_helps_where_the_optimizer_is_the_peak():
    """The least feasible budget is the optimizer's peak, and the error says who holds it."""
    model, x = make(), batch()[:1].clone()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.plan(model, x, 1000, optimizer=optimizer)
    measured = measured_bytes(model, x, optimizer)
    assert caught.value.minimum_bytes == pytest.approx(measured, rel=1e-3)
    assert caught.value.where.startswith("optimizer.step")
    kinds: dict[str, int] = {}
    for kind, _, size in caught.value.holders:
        kinds[kind] = kinds.get(kind, 0) + size
    n_bytes = unique_storage_bytes(model.parameters())
    assert kinds["Parameter"] == n_bytes
    assert kinds["Gradient"] == n_bytes
    assert kinds["Optstate"] == 2 * n_bytes + 4 * len(list(model.parameters()))


def test_an_optimizer_that_has_run_before_gives_the_same():
    """So does one with gradients and parameters of other models in its groups."""
    model, x = make(), batch()
    new = autoac.profile(model, x, optimizer=torch.optim.AdamW(model.parameters()))
    used = torch.optim.AdamW(model.parameters())
    train(model, x, used)
    model.zero_grad(set_to_none=True)
    assert autoac.profile(model, x, optimizer=used).resident_bytes == new.resident_bytes


def test_frozen_parameters_have_no_state():
    model, x = make(), batch()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    profile = autoac.profile(model, x, optimizer=optimizer)
    measured = measured_bytes(model, x, optimizer)
    assert profile.resident_bytes == resident_bytes(model, x, optimizer)
    assert autoac.solve(profile, 10**12).predicted_peak_bytes == pytest.approx(measured, rel=1e-3)


def test_an_optimizer_that_cannot_be_looked_into_is_refused():
    class NeedsAClosure(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure) if closure else closure()

    model = make()
    with pytest.raises(
        autoac.AutoacError,
        match=r"NeedsAClosure cannot be run on fake tensors.* Set headroom=.* in place of optimizer=",
    ):
        autoac.profile(model, batch(), optimizer=NeedsAClosure(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_gpu", "state_on_gpu"),
    [
        # One parameter at a time: the square root of its second moment, and that divided, while the one before is still
        # held. All at once on a GPU: the square roots of all.
        ({}, 3, 4, 8),
        ({"foreach": False}, 3, 3, 8),
        ({"amsgrad": True}, 3, 4, 12),
        ({"fused": True}, 0, 0, 8 + 4 * 512 / 2**20),  # its counters are on the device, a block each
    ],
)
def test_a_gpus_optimizer_takes_all_parameters_at_once(
    options: dict[str, Any], on_cpu: int, on_gpu: int, state_on_gpu: float
):
    """Of four parameters of a MiB each, in MiB; on fake CUDA tensors, for which no GPU is needed."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    profiles = [
        autoac.profile(model, torch.randn(4, 512), optimizer=optimizer, device=d, mode="fake")
        for d in (None, "h200")
    ]
    taken = [next(op for op in p.tape if op.name == "optimizer.step").workspace_bytes for p in profiles]
    # On CPU a Python number among the arguments is a tensor while the op runs.
    assert [taken_bytes / 2**20 for taken_bytes in taken] == pytest.approx([on_cpu, on_gpu], abs=2e-5)
    states = [storage.bytes for storage in profiles[1].storage_table if storage.kind == "Optstate"]
    assert [bytes_ / 2**20 for bytes_ in states] == [state_on_gpu]


class Scaled(torch.optim.Optimizer):
    """Has settings of its own beside its groups, as optimizers of other libraries do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.scale, self.seen = 0.5, dict[str, int]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen["steps"] = self.seen.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("mean", torch.zeros_like(parameter))
                    parameter.sub_(state["mean"].add_(parameter.grad), alpha=group["lr"] * self.scale)


def test_an_optimizer_with_attributes_of_its_own():
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    optimizer = Scaled(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own on the instance
    plain = autoac.profile(model, x)
    profile = autoac.profile(model, x, optimizer=optimizer)
    assert optimizer.seen == {}
    assert not optimizer.state
    assert profile.resident_bytes - plain.resident_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert scheduler.last_epoch == 0


class Tally:
    def __init__(self) -> None:
        self.n = 0


class Counts(torch.optim.SGD):
    """Counts its steps in objects that a copy of it shares: settings of its group, and attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        group = self.param_groups[0]
        group["step"], group["steps"], group["inner"] = torch.zeros(()), [], {"n": 0}
        self.tensor, self.array, self.seen = torch.zeros(1), np.zeros(1), {0}
        self.inner, self.queue = ({"t": torch.zeros(())}, [[0]]), deque([0], maxlen=2)
        self.counter, self.tally = Tally(), SimpleNamespace(n=Counter({"steps": 0}))
        # Not to be touched: of other threads, or odd.
        self.pool = queue.Queue()
        self.sparse = torch.eye(2).to_sparse()

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        group = self.param_groups[0]
        group["step"].add_(1)
        group["steps"].append(1)
        group["inner"]["n"] += 1
        self.tensor += 1
        self.array += 1
        self.seen.add(len(self.seen))
        self.inner[0]["t"].add_(1)
        self.inner[1][0][0] += 1
        self.queue.append(self.queue[-1] + 1)
        self.counter.n += 1
        self.tally.n["steps"] += 1
        self.pool.put(len(group["steps"]))

    def counts(self) -> dict[str, Any]:
        group = self.param_groups[0]
        return {
            "settings": (group["step"].item(), len(group["steps"]), group["inner"]["n"]),
            "attributes": (self.tensor.item(), self.array.item(), len(self.seen)),
            "objects": (self.counter.n, dict(self.tally.n)),
            "nested": (self.inner[0]["t"].item(), self.inner[1][0][0], list(self.queue)),
        }


def test_an_optimizers_own_counts_stay():
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    optimizer, other = Counts(model.parameters()), Counts(nn.Linear(64, 64).parameters())
    other.step()
    assert optimizer.counts() != other.counts()
    autoac.profile(model, x, optimizer=optimizer)
    assert optimizer.pool.qsize() > 1  # a queue may be another thread's
    optimizer.step()
    assert optimizer.counts() == other.counts()


class Compiled(torch.optim.Optimizer):
    """Its step is a compiled function, as optimizers of language models have them."""

    def __init__(self, params: Any, backend: Any) -> None:
        super().__init__(params, {})
        self.update = torch.compile(lambda p, g: p.sub_(g, alpha=0.01), backend=backend, fullgraph=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.update(parameter, parameter.grad)


def test_an_optimizers_compiled_functions_stay_compiled():
    """Dynamo would skip a function for good that it met under a dispatch mode."""
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    backend = CompileCounter()
    optimizer = Compiled(model.parameters(), backend)
    handle = autoac.auto(model, 10**9)
    for _ in range(3):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.plan is not None
    assert "of the optimizer" not in str(handle.plan.notes)
    assert backend.frame_count == 2  # one for each shape
    torch._dynamo.reset()


class LooksBack(torch.optim.SGD):
    """Goes back half of the way to a copy of the parameters in every fifth step, as Lookahead does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.n_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.n_steps += 1
        if self.n_steps % 5:
            return
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            parameter.copy_(slow.lerp(parameter, 0.5))


class Projects(torch.optim.SGD):
    """Keeps few directions of each gradient, which it finds anew in every third step, as GaLore does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.n_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient, state = torch.atleast_2d(parameter.grad), self.state[parameter]
            if self.n_steps % 3 == 0 or not state:
                state["directions"] = (gradient.T @ gradient)[:, :4].contiguous()
            parameter.sub_((gradient @ state["directions"] @ state["directions"].T).view_as(parameter))
        self.n_steps += 1


LATER: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    # Takes more from step 6 on.
    "RAdam": lambda p: torch.optim.RAdam(p, foreach=False),
    "RAdam, foreach": lambda p: torch.optim.RAdam(p, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=3, foreach=False),
    "every fifth": LooksBack,
    "other products in every third": Projects,
}


@pytest.mark.parametrize("n_before", [0, 7])
@pytest.mark.parametrize("name", LATER)
def test_an_optimizer_that_takes_more_in_later_steps(name: str, n_before: int):
    """The budget holds the step that takes most, and no more than that."""
    model, x = make(), batch()[:4].clone()
    optimizer = LATER[name](model.parameters())
    for _ in range(n_before):
        train(model, x, optimizer)
        optimizer.zero_grad(set_to_none=True)
    numbers = [p.detach().clone() for p in model.parameters()]
    plan = autoac.plan(model, x, "1GB", optimizer=optimizer)
    assert all(map(torch.equal, model.parameters(), numbers))
    assert getattr(optimizer, "n_steps", n_before) == n_before
    measured = []
    for _ in range(12):
        optimizer.zero_grad(set_to_none=True)
        measured.append(
            resident_bytes(model, x, optimizer)
            + measure_peak(lambda: train(model, x, optimizer)).peak_above_start_bytes
        )
    assert max(measured) <= plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes == pytest.approx(max(measured), rel=1e-3)


class LowBit(torch.optim.SGD):
    """SGD with momentum, which is kept in eight bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            gradient = torch.atleast_2d(parameter.grad)
            momentum = state["momentum"].values().mul_(0.9) if state else torch.zeros_like(gradient)
            state["momentum"] = Quantized.of(momentum.add_(gradient))
            parameter.sub_(momentum.view_as(parameter), alpha=0.1)


@pytest.mark.parametrize("rows", [64, 4])
def test_the_state_of_a_low_bit_optimizer_counts_with_its_parts(rows: int):
    model, x = make(), batch()[:rows].clone()
    optimizer = LowBit(model.parameters(), lr=0.1)
    plan = autoac.plan(model, x, "1GB", optimizer=optimizer)
    assert plan.predicted_peak_bytes == pytest.approx(measured_bytes(model, x, optimizer), rel=1e-3)
    assert plan.resident_bytes == resident_bytes(model, x, optimizer)


def test_a_state_in_another_dtype_than_its_parameters():
    """As with float32 copies that are put in the parameters' place for the optimizer's step."""
    model, x = make().bfloat16(), batch().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert autoac.profile(model, x, optimizer=optimizer).resident_bytes == resident_bytes(model, x, optimizer)


def test_an_optimizer_that_branches_on_what_it_reads():
    """The early fake steps read true and skip the update; the late ones read false, and make it."""

    class SkipsAtNan(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            parameters = self.param_groups[0]["params"]
            if any(p.grad.isnan().any() for p in parameters):
                return
            for p in parameters:
                p.sub_((p.grad * p).sin() * 0.1)

    model, x = make(), batch()[:4].clone()
    optimizer = SkipsAtNan(model.parameters(), lr=0.1)
    plan = autoac.plan(model, x, "1GB", optimizer=optimizer)
    assert plan.predicted_peak_bytes == pytest.approx(measured_bytes(model, x, optimizer), rel=1e-3)


def test_late_steps_that_fail_are_named():
    class Ends(torch.optim.SGD):
        n_steps = 0

        def step(self, closure: Any = None) -> Any:
            self.n_steps += 1
            if self.n_steps > 1000:
                raise ValueError("over")
            return super().step(closure)

    model = make()
    profile = autoac.profile(model, batch(), optimizer=Ends(model.parameters(), lr=0.1))
    assert profile.notes[-1].endswith("; its late steps failed on fake tensors and are not counted")
