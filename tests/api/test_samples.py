"""Several batches in place of one: the highest peak is planned for, and what is said of the others is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autoac
from autoac.measure import measure_peak
from autoac.step.samples import Samples, shapes_of
from tests.small_models import WIDTH, Blocks, make

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (16, 64, 40)


@pytest.fixture(scope="module")
def planned() -> tuple[Blocks, autoac.Plan]:
    torch.manual_seed(0)
    model = make(blocks=4).train()
    batches = Samples([torch.randn(size, WIDTH) for size in SIZES])
    profile = autoac.profile(model, batches)
    assert any("of 3 samples that with the highest peak" in note for note in profile.notes)
    full = autoac.solve(profile, 10**9).record.unplanned_peak_bytes
    budget = int(profile.resident_bytes + 0.7 * (full - profile.resident_bytes))
    return model, autoac.plan(model, batches, budget)


def test_the_highest_peak_is_planned_for(planned: tuple[Blocks, autoac.Plan]):
    _, plan = planned
    assert plan.record.profile.sample == f"float32[64,{WIDTH}]"
    assert any(region.wrapped for region in plan.regions)
    assert list(plan.samples["sample"]) == [f"float32[{size},{WIDTH}]" for size in (64, 40, 16)]
    assert plan.samples["fits"].all()
    first = plan.samples.iloc[0]
    assert first.peak_bytes == plan.predicted_peak_bytes
    assert first.overhead == plan.predicted_overhead


def test_the_others_take_what_is_said(planned: tuple[Blocks, autoac.Plan]):
    model, plan = planned
    for row, size in zip(plan.samples.itertuples(), (64, 40, 16), strict=True):
        x = torch.randn(size, WIDTH)
        resident = plan.resident_bytes - 4 * WIDTH * (64 - size)

        def step(x: torch.Tensor = x) -> None:
            output = model(x)  # alive until backward is over
            output.mean().backward()

        peaks = []
        for applied in (False, True):
            model.zero_grad(set_to_none=True)
            if applied:
                with plan.applied(model):
                    taken = measure_peak(step)
            else:
                taken = measure_peak(step)
            peaks.append(resident + taken.peak_above_start_bytes)
        model.zero_grad(set_to_none=True)
        assert peaks == [row.unplanned_peak_bytes, row.peak_bytes]


def test_what_does_not_fit_is_said(planned: tuple[Blocks, autoac.Plan]):
    from autoac.outcomes import with_outcomes

    model, plan = planned
    larger = autoac.profile(model, torch.randn(96, WIDTH))
    told = with_outcomes(plan, [larger])
    assert list(told.samples["fits"]) == [True, False]
    (note,) = (note for note in told.record.profile.notes if "of 2 samples" in note)
    assert "does NOT fit" in note
    assert note in told.explain()


def test_a_saved_plan_has_the_notes(planned: tuple[Blocks, autoac.Plan], tmp_path: Any):
    _, plan = planned
    plan.save(tmp_path / "plan.json")
    loaded = autoac.Plan.load(tmp_path / "plan.json")
    assert loaded.samples.equals(plan.samples)
    assert any("of 3 samples" in note and "fits" in note for note in loaded.record.profile.notes)


class Routed(nn.Module):
    """Two experts, the second of them wider: a batch's signs choose."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for wide in (8, 256)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            rows = torch.where((x[:, 0] > 0) == bool(place))[0]
            result = result.index_add(0, rows, expert(x[rows]))
        return result


@pytest.mark.parametrize("order", [1, -1])
def test_batches_of_the_same_shape_where_values_decide(order: int):
    torch.manual_seed(0)
    model, x = nn.Sequential(Routed(), nn.Linear(WIDTH, WIDTH)), torch.randn(64, WIDTH)
    small, large = (x.clone() for _ in range(2))
    small[:, 0], large[:, 0] = -5, 5
    alone = autoac.plan(model, large, 10**9)
    assert any(
        "sizes of tensors depend on values (aten.nonzero.default) in '0'" in note for note in alone.notes
    )
    plan = autoac.plan(model, Samples([small, large][::order]), 10**9)
    assert plan.predicted_peak_bytes == alone.predicted_peak_bytes
    assert len(plan.samples) == 2
    assert plan.verify(model, large).measured_peak_bytes == plan.predicted_peak_bytes
    assert (
        plan.verify(model, small).measured_peak_bytes
        == plan.samples.iloc[1].peak_bytes
        < plan.predicted_peak_bytes
    )
    equal = [torch.randn(8, WIDTH)] * 2  # shapes do not depend on values
    assert len(autoac.plan(nn.Linear(WIDTH, 1), Samples(equal), 10**9).samples) == 1


def test_a_loop_where_values_decide_is_warned():
    torch.manual_seed(0)
    model, x = nn.Sequential(Routed(), nn.Linear(WIDTH, WIDTH)), torch.randn(64, WIDTH)
    recorded = autoac.profile(model, x)
    handle = autoac.auto(model, int(0.5 * (recorded.least_peak_bytes + recorded.peak_bytes)))
    model(x).mean().backward()
    model.zero_grad(set_to_none=True)
    with pytest.warns(UserWarning, match="sizes of tensors depend on values in this loop's steps"):
        model(x)
    handle.remove()


def test_samples():
    x, y = torch.randn(4, 2), torch.randn(3, 2)
    assert len(Samples([x, y, x]).batches) == 2
    assert len(Samples([x, y], 1).batches) == 1
    loader = torch.utils.data.DataLoader([{"x": row} for row in torch.randn(7, 2)], batch_size=4)  # type: ignore[arg-type]
    assert repr(Samples(loader, 8)) == "Samples(x float32[4,2]; x float32[3,2])"
    many = [torch.zeros(1)] * 8
    assert len(Samples([(*many, x), (*many, x.T)]).batches) == 2  # a description names the first eight
    assert shapes_of((x, y)) == "float32[4,2], float32[3,2]"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (((), None), "given no batch"),
        ((3, None), "given a int"),
        (({"x": torch.ones(1)}, None), "given a dict"),
        (([torch.ones(1)], 0), "takes 0 batches"),
        (([torch.ones(1)], True), "takes True batches"),
        (([lambda: None], None), "a callable runs a whole step"),
    ],
)
def test_what_samples_refuse(given: tuple[Any, Any], words: str):
    with pytest.raises(ValueError, match=words):
        Samples(*given)


def test_a_loader_of_lists_and_a_number():
    """As torch's default collate function makes batches; the model takes both tensors of a batch."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Blocks()

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.blocks(x) * scale

    data = torch.utils.data.TensorDataset(torch.randn(12, WIDTH), torch.ones(12, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8)  # the second batch is smaller
    expected = autoac.profile(Scaled(), autoac.Samples(loader, 2), loss=torch.sum)
    assert expected.sample == f"float32[8,{WIDTH}], float32[8,1]"
    plan = autoac.plan(Scaled(), (loader, 2), "1GB", loss=torch.sum)
    assert plan.record.profile.sample == expected.sample
    assert len(plan.samples) == 2
    with pytest.raises(ValueError, match="takes 0 batches"):
        autoac.plan(Scaled(), (loader, 0), "1GB", loss=torch.sum)


def test_where_several_batches_are_none():
    model = make(blocks=1)
    with pytest.raises(autoac.ProfilingError, match="sample is a Samples"):
        autoac.solve(autoac.profile(model, torch.randn(4, WIDTH)), 10**9).verify(
            model, Samples([torch.ones(1, WIDTH)])
        )
    with pytest.raises(autoac.ProfilingError, match=r"autoac\.Samples\(sample\)"):
        autoac.plan(model, [torch.ones(1, WIDTH)], 10**9)
    loader = DataLoader(torch.ones(4, WIDTH))  # type: ignore[arg-type]
    with pytest.raises(autoac.ProfilingError, match=r"DataLoader pass autoac\.Samples\(sample, 8\)"):
        autoac.plan(model, loader, 10**9)
    with pytest.raises(autoac.ProfilingError, match="sample is a int"):
        autoac.plan(model, 3, 10**9)
    with pytest.raises(autoac.ProfilingError, match="loss is 3"):
        autoac.plan(model, torch.ones(1, WIDTH), 10**9, loss=3)  # type: ignore[arg-type]
