"""Tails: what a model's own code runs after its blocks, with the loss, compiled as a region."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from autoac.calibrate.compiled import on_disk, table
from autoac.compare.compiled import by_torch
from autoac.execute.compiled import code, engine
from autoac.execute.compiled.code import compiled
from autoac.measure import measure_peak
from autoac.torch_private import frames_translated
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.profile import Profile
from tests.small_models import assert_same, attributes

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WIDTH, CLASSES, ROWS = 32, 2048, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = cast("list[Layer]", nn.ModuleList(Layer() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x}


class Classifier(nn.Module):
    """As transformers' models: a body, and in the code of its own a head and the loss, in float32."""

    def __init__(self, own: str = "") -> None:
        super().__init__()
        self.own, self.steps, self.scale, self.log = own, 0, 1.0, list[int]()
        self.body, self.head = Body(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.body(x.to(self.head.weight.dtype))["hidden"]
        logits = self.head(hidden)
        if self.own == "break":
            torch._dynamo.graph_break()
            logits = logits + self.head.weight.sum()
            torch._dynamo.graph_break()
        if self.own == "numbers":
            self.steps += 1
            logits = logits * (self.steps * self.scale)
        if self.own == "log":
            self.log.append(len(self.log))
        if self.own == "dropout":
            logits = F.dropout(logits, 0.1, self.training)
        return (
            {"logits": logits}
            if target is None
            else {
                "loss": F.cross_entropy(logits.float(), target),
                "logits": logits,
            }
        )


class Looping(nn.Module):
    """Its own code loops over its blocks. What comes before and between them needs a gradient, and Python changes."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.runs = way, 0
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.layers = cast("list[Noted]", nn.ModuleList(Noted() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.noted = F.gelu(x + self.shift)
        said = torch.zeros(())
        if self.way == "plain":
            for layer in self.layers:
                x = x + layer(x)
        elif self.way == "loop":
            for layer in self.layers:
                x, said = layer(x), said + layer.said
                self.runs += 1
        else:
            x, said = self.through(x)
        loss = F.cross_entropy(self.head(self.norm(x)), target)
        return {"loss": loss + 0.1 * said}

    def through(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers[:2]:
            x = layer(x)
            self.runs += 1
        x = self.layers[2](x)
        self.runs += 1
        return x, torch.stack([layer.said for layer in self.layers]).sum()


class Noted(Layer):
    """Leaves something behind that the model's own code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.said = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.said = x.square().mean()
        return x


def make(dtype: torch.dtype = torch.float32, **options: Any) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(**options).to(dtype)


def batch(rows: int = ROWS, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, WIDTH, generator=generator),
        "target": torch.randint(CLASSES, (rows,), generator=generator),
    }


def gradients(model: nn.Module, **given: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(**given)["loss"], list(model.parameters())))


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the compiler keeps what it compiles, empty at first. Compiled code counts as faster than any other."""

    def fast(*args: Any) -> Any:
        found = enumerate(points_of(*args), 1)
        return tuple(
            replace(point, forward_s=0.0, backward_s=1.0 if point.name == EAGER else 1e-9 * index)
            for index, point in found
        )

    points_of = table.measured_points
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path))
        patch.setattr(table, "MOST_COMPILED", 2)
        patch.setattr(table, "measured_points", fast)
        patch.setattr(on_disk.PointsOnDisk, "read", lambda self: None)
        torch._dynamo.reset()
        compiled.cache_clear()
        yield path


@pytest.fixture(scope="module")
def plan() -> autoac.Plan:
    model = make()
    before, random = attributes(model), torch.get_rng_state()
    found = autoac.plan(model, batch(), "1GB", engine="compile")
    assert attributes(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    return found


@pytest.fixture(scope="module")
def profile(plan: autoac.Plan) -> Profile:
    return plan.record.profile


def points(plan: autoac.Plan) -> dict[str, str]:
    return {region.name: region.point for region in plan.regions if region.wrapped}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_after_the_blocks_is_a_region(plan: autoac.Plan, dtype: torch.dtype):
    model, given = make(dtype), batch()
    if dtype != torch.float32:
        plan = autoac.plan(model, given, "1GB", engine="compile")
    assert sorted(points(plan)) == [":1", "body.layers.0", "body.layers.1", "body.layers.2"]
    assert "cross entropy of the model itself is compiled, with what comes after its blocks" in plan.summary()
    report = plan.verify(model, given)
    assert report.ok, report
    assert report.measured_peak_bytes == plan.predicted_peak_bytes
    # Torch has logits, log-probabilities and their gradient in float32, beside the logits.
    eager = measure_peak(lambda: gradients(model, **given)).peak_above_start_bytes
    saved = ROWS * CLASSES * 4 if dtype == torch.bfloat16 else 0
    assert plan.predicted_peak_bytes - plan.resident_bytes < eager - saved


def test_steps_and_sizes(plan: autoac.Plan):
    """Of the planned size, of others, and without a target: as without a plan, but for the order of additions."""
    model, plain = plan.apply(make()), make()
    for rows in (ROWS, ROWS, 24, 40, ROWS):
        given = batch(rows, seed=rows)
        assert_close(gradients(model, **given), gradients(plain, **given))
    x = batch(8)["x"]
    for one in (model, plain):
        one.zero_grad()
        one(x)["logits"].sum().backward()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    with torch.no_grad():
        assert torch.equal(model(**batch())["loss"], plain(**batch())["loss"])
    twin = copy.deepcopy(model)
    before = [p.clone() for p in model.parameters()]
    torch.optim.SGD(twin.parameters(), 0.1).step(lambda: twin(**batch())["loss"].backward())
    assert_same(before, list(model.parameters()))


def test_gradients_of_other_outputs(plan: autoac.Plan):
    """A loop may use the logits, too, or alone."""
    model, plain = plan.apply(make()), make()

    def all_of(one: nn.Module) -> list[torch.Tensor]:
        found, leaves = one(**batch()), list(one.parameters())
        both = torch.autograd.grad(found["loss"] + found["logits"].square().mean(), leaves)
        return [*both, *torch.autograd.grad(one(**batch())["logits"].sin().sum(), leaves)]

    assert_close(all_of(model), all_of(plain))


def assert_close(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_file_has_it_and_removal_leaves_no_trace(plan: autoac.Plan, tmp_path: Path):
    plan.save(tmp_path / "plan.json")
    loaded, model = autoac.Plan.load(tmp_path / "plan.json"), make()
    before = attributes(model)
    assert points(loaded) == points(plan)
    assert_same(gradients(loaded.apply(model), **batch()), gradients(plan.apply(make()), **batch()))
    loaded.remove(model)
    assert attributes(model) == before
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("way", ["loop", "function"])
def test_a_forward_that_loops_over_its_blocks(way: str):
    """Python code runs as it does uncompiled, before the blocks and between them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain, model = Looping(way), Looping(way)
    model.load_state_dict(plain.state_dict())
    plan = autoac.plan(model, batch(), "1GB", engine="compile")
    assert ":1" in points(plan), plan.record.profile.notes
    report = plan.verify(model, batch())
    assert report.ok, report
    assert report.measured_peak_bytes == plan.predicted_peak_bytes
    plan.apply(model)
    model.runs = plain.runs = 0
    for rows in (ROWS, 24, ROWS, 40):
        given = batch(rows, seed=rows)
        assert_close(gradients(model, **given), gradients(plain, **given))
        assert model.runs == plain.runs
        assert_close(
            [model.noted, *(layer.said for layer in model.layers)],
            [plain.noted, *(layer.said for layer in plain.layers)],
        )
    calls = list[str]()
    model.layers[1].register_forward_hook(lambda *_: calls.append("hook"))
    assert_close(gradients(model, **batch()), gradients(plain, **batch()))
    assert calls == ["hook"]
    hook = model.norm.register_forward_hook(lambda *_: calls.append("norm"))
    with pytest.warns(UserWarning, match="region ':1' has hooks on module 'norm' since it was planned"):
        assert_close(gradients(model, **batch()), gradients(plain, **batch()))
    assert calls[1:] == ["hook", "norm"]
    hook.remove()
    model.noted = None  # type: ignore[assignment]
    for layer in model.layers:
        layer.said = layer.said.detach()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layers[0].down.weight.zero_()
    assert_close(gradients(model, **batch()), gradients(plain, **batch()))
    with torch.no_grad():
        plain.layers[0].down.weight.zero_()
    assert_close(gradients(twin, **batch()), gradients(plain, **batch()))


def test_hooks(plan: autoac.Plan):
    """Those on the body run, and on a head whose logits are returned, which is no part of the tail."""
    model, calls = plan.apply(make()), list[str]()
    wanted = gradients(model, **batch())
    with_hook = model.body.register_forward_hook(lambda *_: calls.append("body"))
    assert_same(gradients(model, **batch()), wanted)
    assert calls == ["body"]
    with_hook.remove()
    model.head.register_forward_hook(lambda *_: calls.append("head"))
    assert_same(gradients(model, **batch()), wanted)
    assert calls == ["body", "head"]


def test_where_memory_is_short_the_loss_may_be_chunked_instead(profile: Profile, plan: autoac.Plan):
    found = {bool(set(points(one)) & {":1"}) for one in (plan, *_budgets(profile, plan))}
    assert True in found
    with_tail = autoac.solve(profile, "1GB", engine="compile").record.profile.tails
    assert [tail.call for tail in with_tail] == [0]
    replayed = autoac.solve(profile, "1GB", engine="replay")  # the tail is no region of its
    assert all(":" not in region.name for region in replayed.regions)


def _budgets(profile: Profile, plan: autoac.Plan) -> list[autoac.Plan]:
    with pytest.raises(autoac.InfeasibleBudgetError) as refused:
        autoac.solve(profile, 1, engine="compile")
    least, most = refused.value.minimum_bytes, plan.predicted_peak_bytes
    return [autoac.solve(profile, least + (most - least) * i // 3, engine="compile") for i in range(3)]


@pytest.mark.parametrize(
    ("own", "why"), [("break", "torch.compile makes 3 graphs of it"), ("dropout", "it draws random numbers")]
)
def test_it_is_left_as_it_is_where_that_is_not_one_graph_or_draws(own: str, why: str):
    model = make(own=own)
    found = autoac.profile(model, batch(), engine="compile")
    assert (
        f"what the model itself computes after its blocks, with the loss, is not compiled: {why}"
        in found.notes
    )
    plan = autoac.solve(found, "1GB", engine="compile")
    assert sorted(points(plan)) == ["body.layers.0", "body.layers.1", "body.layers.2"]
    assert "goes backward in place, with torch's bits" in plan.summary()


def test_uncompiled_its_loss_is_that_of_other_plans(profile: Profile):
    """So there is no uncompiled point, at which the log-probabilities' gradient would count twice."""
    assert profile.compiled is not None
    [tail] = [region for region in profile.compiled.regions if region.calls == (len(profile.spans) - 1,)]
    assert EAGER not in [point.name for point in tail.points]


def test_named_regions_have_none(profile: Profile):
    found = autoac.profile(make(), batch(), engine="compile", regions=["body.layers.*"])
    assert not found.tails
    assert [strategy.name for strategy in by_torch(profile, (1.0,))]  # rivals compile the same


@pytest.mark.parametrize("loops", [False, True])
def test_a_loop_that_takes_the_loss_only(loops: bool):
    """Its logits are dropped at once, but the code of the head, or autograd, may hold them. One call a step."""
    model, plain = (Looping("plain"), Looping("plain")) if loops else (make(), make())
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    other = torch.optim.SGD(plain.parameters(), 0.1)
    handle = autoac.auto(model, "1GB", engine="compile", optimizer=optimizer)
    for step in range(6):
        losses = []
        for one, by in ((plain, other), (model, optimizer)):
            loss = one(**batch(seed=step))["loss"]
            loss.backward()
            by.step()
            by.zero_grad()
            losses.append(loss.detach())
        assert_close(losses[:1], losses[1:])
    assert handle.plan is not None
    assert ":1" in points(handle.plan)
    assert handle.measured_peak_bytes is not None
    known = handle.plan.record.profile
    handle.remove()
    assert known.compiled is not None
    assert abs(known.compiled.unseen_bytes) <= 512  # before the first planned step was measured, it was right


def test_numbers_that_change_at_every_step():
    """A counter of steps, and an attribute that the loop sets: they become inputs of the code."""
    model, plain = make(own="numbers"), make(own="numbers")
    plan = autoac.plan(model, batch(), "1GB", engine="compile")
    plan.apply(model)
    translated = list[int]()
    for step in range(12):
        model.scale = plain.scale = 0.5 / (1 + step)
        assert_close(gradients(model, **batch()), gradients(plain, **batch()))
        translated.append(frames_translated())
    assert translated[4] == translated[-1]
    assert not plan.placement.not_compiled


def test_python_that_needs_other_code_at_every_step(monkeypatch: pytest.MonkeyPatch):
    """It runs uncompiled then, and a warning tells. Batches of other sizes are counted by themselves."""
    model, plain = make(own="log"), make()
    plan = autoac.plan(model, batch(), "1GB", engine="compile")
    plan.apply(model)
    wanted = gradients(plain, **batch())
    with pytest.warns(
        UserWarning, match="region ':1' runs uncompiled from now on, as torch would compile it anew"
    ):
        found = [gradients(model, **batch()) for _ in range(12)]
    for one in found:
        assert_close(one, wanted)
    assert plan.placement.not_compiled.keys() == {":1"}
    model.own, compiled_for = "", list[Any]()

    def noted(function: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        compiled_for.append(len(kwargs["x"]))
        return code.run_tail(function, module, args, kwargs)

    monkeypatch.setattr(engine, "run_tail", noted)
    for rows in (24, 40, ROWS):
        assert_close(gradients(model, **batch(rows)), gradients(plain, **batch(rows)))
    assert compiled_for == [24, 40]


@pytest.mark.usefixtures("plan")  # whose imports warn
def test_a_loop_plans_anew_without_a_tail_that_runs_uncompiled():
    model, plain = make(own="log"), make()
    model.log.append(-1)  # for the lists of other tests there is code already
    handle = autoac.auto(model, "1GB", engine="compile")
    with pytest.warns(UserWarning, match="region ':1' runs uncompiled from now on"):
        found = [gradients_in_place(model, **batch(seed=step)) for step in range(20)]
    for step, one in enumerate(found):
        assert_close(one, gradients_in_place(plain, **batch(seed=step)))
    assert handle.plan is not None
    known = handle.plan.record.profile
    assert points(handle.plan)
    assert ":1" not in points(handle.plan)
    assert "computes after its blocks, with the loss, is not compiled: torch compiles it anew" in str(
        known.notes
    )
    handle.remove()


def gradients_in_place(model: nn.Module, **given: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(**given)["loss"].backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_blocks_run_once_if_the_compiler_fails_after_them(plan: autoac.Plan, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> None:
        raise RuntimeError("no kernel")

    torch._dynamo.reset()
    compiled.cache_clear()
    model, plain, calls = plan.apply(make()), make(), list[str]()
    model.body.register_forward_hook(lambda *_: calls.append("body"))
    monkeypatch.setattr(code, "compiled_by_inductor", fails)
    other = batch(17)
    with pytest.warns(UserWarning, match="region ':1' cannot be compiled for these inputs.*no kernel"):
        assert_close(gradients(model, **other), gradients(plain, **other))
    assert calls == ["body"]
    assert_close(gradients(model, **other), gradients(plain, **other))
    assert calls == ["body", "body"]
    plan.remove(model)
    compiled.cache_clear()


@pytest.mark.filterwarnings("ignore:module 'nets.1' is called, and the planned step did not call it")
def test_a_module_like_it_that_the_recorded_step_did_not_call():
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = cast("list[Classifier]", nn.ModuleList(make() for _ in range(2)))

        def forward(self, which: int, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
            return self.nets[which](x, target)

    model, plain = Towers(), Towers()
    plain.load_state_dict(model.state_dict())
    plan = autoac.plan(model, {"which": 0, **batch()}, "1GB", engine="compile")
    assert "nets.0:1" in points(plan)
    plan.apply(model)
    peaks = []
    for which in (0, 1):
        loss = model(which, **batch())["loss"]
        assert_close([loss], [plain(which, **batch())["loss"]])
        parameters = list(model.nets[which].parameters())
        run = lambda which=which, parameters=parameters: torch.autograd.grad(  # noqa: E731
            model(which, **batch())["loss"], parameters
        )
        run()
        peaks.append(measure_peak(run).peak_above_start_bytes)
    assert peaks[0] == peaks[1]


def test_in_a_loop_with_micro_batches():
    model, plain = make(), make()
    losses = []
    for one, planned in ((plain, False), (model, True)):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        handle = autoac.auto(one, "1GB", engine="compile", optimizer=optimizer) if planned else None
        told = []
        for step in range(7):
            for half in (0, 1):
                loss = one(**batch(seed=2 * step + half))["loss"]
                loss.backward()
                told.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(told)
        if handle is not None:
            assert handle.plan is not None
            assert handle.measured_peak_bytes is not None
            assert {":1", "#1:1"} <= points(handle.plan).keys()
            assert handle.plan.predicted_peak_bytes * 0.99 <= handle.measured_peak_bytes
            assert handle.measured_peak_bytes <= handle.plan.predicted_peak_bytes * 1.01
            handle.remove()
    assert_close(losses[0], losses[1])
