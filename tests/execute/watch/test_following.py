"""A plan that is not followed: one word for the whole model, and a report. Modules that were not called."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import autoac
from autoac.execute.watch.other_calls import unwatch_other_calls, watch_newcomers
from autoac.measure import measure_peak
from autoac.step.carried import planned
from autoac.torch_private import TorchDispatchMode
from tests.small_models import BATCH, WIDTH, Block, batch, make, tight_plan

pytestmark = pytest.mark.usefixtures("one_thread")


class Layer(nn.Module):
    """A block, and an activation of its owner's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0.0)
        self.other = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        return torch.sigmoid(x) if self.other else torch.tanh(x)


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(count)))


def switch(model: nn.Module, other: bool) -> None:
    """Let the layers take the other activation."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.other = other


def step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(batch()).square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


@contextmanager
def heard() -> Iterator[list[str]]:
    words: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield words
    words += [str(warning.message) for warning in told]


def plan_for(model: nn.Module, regions: list[str] | None = None, engine: str = "replay") -> autoac.Plan:
    return tight_plan(autoac.profile(model, batch()), engine, regions)


def test_one_word_for_the_whole_model():
    model = layers().train()
    plan = plan_for(model, ["0", "1", "2", "3"])
    wrapped = [region.name for region in plan.regions if region.wrapped]
    assert len(wrapped) > 2
    assert not plan.is_not_followed
    assert str(plan.is_not_followed) == "the plan is followed"
    switch(model, True)
    expected = step(model)
    with plan.applied(model), heard() as words:
        found = next(step(model) for _ in range(2))
        taken = measure_peak(lambda: step(model))
        report = plan.is_not_followed
    assert all(map(torch.equal, found, expected))
    assert len(words) == 1
    assert words[0] == str(report)
    assert "region" in words[0]
    assert "another mode or configuration" in words[0]
    assert report
    assert report.regions == tuple(wrapped)
    assert report.deviations[0].expected == "aten.tanh.default"
    assert report.deviations[0].came == report.deviations[0].unknown == "aten.sigmoid.default"
    assert report.planned_peak_bytes == plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes < report.peak_bytes <= plan.record.unplanned_peak_bytes
    assert plan.resident_bytes + taken.peak_above_start_bytes <= report.peak_bytes


def test_it_is_said_anew_where_the_plan_is_applied_anew():
    model = layers().train()
    plan = plan_for(model)
    switch(model, True)
    for _ in range(2):
        with plan.applied(model), heard() as words:
            step(model)
        assert len(words) == 1
    switch(model, False)
    with plan.applied(model), heard() as words:
        step(model)
    assert not words
    assert not plan.is_not_followed


def test_a_step_that_does_not_call_the_root():
    model = layers().train()
    plan = plan_for(model, ["0", "1", "2", "3"])
    switch(model[1], True)
    with plan.applied(model), heard() as words:
        x = batch()
        for layer in model:
            x = layer(x)
        x.square().mean().backward()
    assert len(words) == 1


def test_engine_sac():
    model = layers().train()
    plan = plan_for(model, engine="sac")
    switch(model, True)
    expected = step(model)
    with plan.applied(model), heard() as words:
        found = step(model)
    assert all(map(torch.equal, found, expected))
    assert len(words) == 1
    assert "aten.sigmoid.default" in words[0]
    assert plan.is_not_followed


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_planned_model(make_copy):
    model = layers().train()
    plan = plan_for(model)
    with plan.applied(model):
        other = make_copy(model)
    switch(other, True)
    with heard() as words:
        step(other)
    assert len(words) == 1
    assert "is not followed" in words[0]


def test_causes():
    model = make(dropout=0.2, blocks=3).eval()
    plan = plan_for(model)
    with plan.applied(model.train()), heard() as words:
        step(model)
    assert "the model is in train mode, and the plan was made in eval mode: call model.eval()" in words[0]

    model = make(dropout=0.2, blocks=3).train()
    plan = plan_for(model)
    with plan.applied(model), heard() as words:
        step(model.eval())
    assert not words  # fewer ops, and none that is not known

    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.1, batch_first=True)
    )
    plan = plan_for(model.train())
    with plan.applied(model), heard() as words:
        step(model.eval())  # other attention, which comes of that
    assert "the model is in eval mode, and the plan was made in train mode: call model.train()" in words[0]

    model = make(dropout=0.0, blocks=3).train()
    plan = plan_for(model)
    model.to(torch.float64)
    with pytest.raises(autoac.PlanMismatchError):
        plan.apply(model)


def test_another_attention_implementation():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(64, (2, 16))
    sample = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = tight_plan(autoac.profile(model, sample), "replay", ["model.layers.0", "model.layers.1"])
    model.set_attn_implementation("eager")
    with plan.applied(model), heard() as words:
        model(**sample).loss.backward()
    assert len(words) == 1
    assert "another attention implementation" in words[0]
    assert any("scaled_dot_product" in deviation.expected for deviation in plan.is_not_followed.deviations)


# -- modules that the profiled step did not call -----------------------------------------------------------------------


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(0.1) for _ in range(4))
        self.wide = nn.ModuleList([Block(0.1)])
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i not in self.skipped:
                x = block(x)
        return x


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_call_of_the_model_itself_is_no_newcomer():
    """Lightning calls it within its step, for the sake of DDP, and planned was a step that does not."""
    model = Skipping().train()
    called = watch_newcomers(
        model, {name for name, _ in model.named_modules() if name not in ("", "blocks.0")}
    )
    step(model)
    unwatch_other_calls(model)
    assert called == {"blocks.0"}


@pytest.mark.filterwarnings("ignore:module 'blocks.[13]' is called, and the planned step did not call it")
@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_module_that_was_not_called_is_treated_like_one_that_is_alike(engine):
    torch.manual_seed(0)
    model = Skipping().train()
    model.skipped = {1, 3}
    plan = plan_for(model, ["blocks.0", "blocks.2"], engine)
    model.skipped = set()
    torch.manual_seed(1)
    expected = step(model)

    def ops() -> int:
        with Counted() as counted:
            step(model)
        return counted.count

    plain = ops()
    with plan.applied(model):
        carried = {name for name, module in model.named_modules() if planned(module)}
        torch.manual_seed(1)
        found = step(model)
        all_four = ops() - plain
        model.skipped = {1, 3}
        two = ops()
    assert {"blocks.1", "blocks.3"} <= carried
    assert not any(name.startswith("wide") for name in carried)
    assert all(map(torch.equal, found, expected))
    assert all_four > two - ops() > 0  # those that were not called recompute, too
    assert not any(planned(module) for module in model.modules())
    assert not plan.is_not_followed


def test_of_modules_alike_by_name_one_that_is_built_the_same_is_taken():
    torch.manual_seed(0)
    model = Skipping().train()
    for index in (1, 3):
        model.blocks[index] = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.GELU())
    model.skipped = {2, 3}
    again = (
        autoac.Policy("MUST_RECOMPUTE", op="aten.relu*"),
        autoac.Policy("MUST_RECOMPUTE", op="aten.addmm*"),
    )
    plan = autoac.plan(model, batch(), 10**9, regions=["blocks.0", "blocks.1"], policies=again)
    assert all(region.wrapped for region in plan.regions)
    model.skipped = set()
    with plan.applied(model):
        assert {"blocks.2", "blocks.3"} <= {n for n, module in model.named_modules() if planned(module)}


# -- several steps are verified ----------------------------------------------------------------------------------------


def test_verify_of_several_steps():
    class Dropping(Skipping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.skipped = {i for i in range(1, 4) if torch.rand(()) < 0.4}
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Dropping().train(), torch.randn(BATCH, WIDTH)
    plan = tight_plan(autoac.profile(model, x), "replay")
    state = torch.get_rng_state()
    report = plan.verify(model, x, steps=8)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.ok
    assert len(report.peaks_bytes) == 8
    assert len(set(report.peaks_bytes)) > 1
    assert report.measured_peak_bytes == max(report.peaks_bytes) <= plan.budget_bytes
    assert "the largest of 8 steps" in str(report)
    assert "none is over the budget" in str(report)
    for steps in (0, True, 1.5):
        with pytest.raises(ValueError, match="at least one step"):
            plan.verify(model, x, steps=steps)  # type: ignore[arg-type]
    one = plan.verify(model, x)
    assert one.peaks_bytes == (one.measured_peak_bytes,)
    assert "the largest of" not in str(one)
