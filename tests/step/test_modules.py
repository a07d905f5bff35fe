"""Which modules become regions: found from the profile, or named by the user."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.step.modules import lean_modules, select_modules
from autoac_solver.plan.partitions import partitions
from autoac_solver.plan.planning import named_calls
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import Profile
from tests import real_models
from tests.small_models import batch, make, tight_plan

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def profile_of(name: str) -> Profile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = real_models.make(name)
        return autoac.profile(real.model, real.sample, loss=real.loss)


def choices(profile: Profile) -> list[list[str]]:
    return [[profile.module_name(call) for call in choice] for choice in partitions(profile)]


MODELS = {
    "gpt2": [f"transformer.h.{i}" for i in range(3)],
    "llama": [f"model.layers.{i}" for i in range(3)],
    "bert": [f"bert.encoder.layer.{i}" for i in range(3)],
    "t5": [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(2)],
    "clip": [f"{part}.encoder.layers.{i}" for part in ("vision_model", "text_model") for i in range(2)],
    "resnet": ["resnet.encoder.stages.1", "resnet.encoder.stages.2"],
    "cnn_with_skips": ["down.0", "down.1", "down.2", "up.0", "up.1"],
    "unet": ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"],
}


@pytest.mark.parametrize("name", MODELS)
def test_what_people_would_choose_is_among_the_choices(name: str):
    """Layers, stages, the parts of an encoder-decoder, both towers."""
    assert any(set(MODELS[name]) <= set(choice) for choice in choices(profile_of(name)))


def test_calls_of_shared_modules_are_regions_of_their_own():
    layer = "albert.encoder.albert_layer_groups.0"
    assert {layer, f"{layer}#1", f"{layer}#2", f"{layer}#3"} <= set(choices(profile_of("albert"))[0])
    assert {"pool", "pool#1"} <= set(choices(profile_of("cnn_with_skips"))[0])


@pytest.mark.parametrize("name", [*MODELS, "albert"])
def test_choices_are_from_coarse_to_fine_and_never_nested(name: str):
    profile = profile_of(name)
    found = partitions(profile)
    assert len(set(found)) == len(found)
    assert found[-1] == (0,)  # the whole model as one region is the last resort
    for choice in found:
        assert list(choice) == sorted(choice)
        for call in choice:
            parent = profile.calls[call].parent
            while parent >= 0:
                assert parent not in choice
                parent = profile.calls[parent].parent
    coarse, fine = set(found[0]), set(found[1])
    for call in fine - coarse:  # is inside a region of the coarser choice, or was covered by none
        parents = []
        while call >= 0:
            parents.append(call)
            call = profile.calls[call].parent
        assert coarse & set(parents[1:]) or not coarse & set(parents)


def test_modules_without_gradients_are_no_regions():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained = (
                nn.Linear(8, 8),
                nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.frozen(x)
            return self.trained(x)

    profile = autoac.profile(Encoder(), torch.randn(16, 8))
    assert all("frozen" not in choice for choice in choices(profile))
    assert named_calls(profile, ["frozen"]) == []


# -- named -------------------------------------------------------------------------------------------------------------


def is_block(name: str, module: nn.Module) -> bool:
    return type(module).__name__ == "Block"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("blocks.1", ["blocks.1"]),
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.2", "blocks.0"], ["blocks.2", "blocks.0"]),
        (("blocks.0", "head"), ["blocks.0", "head"]),
        (iter(["blocks.0"]), ["blocks.0"]),
        ({"blocks.0": 1}, ["blocks.0"]),
        ("*.up", ["blocks.0.up", "blocks.1.up", "blocks.2.up"]),
        ("blocks.[01].up", ["blocks.0.up", "blocks.1.up"]),
        (["blocks.0", "blocks.*"], ["blocks.0", "blocks.1", "blocks.2"]),
        ("", [""]),
        ("*", ["blocks.0", "blocks.1", "blocks.2", "head"]),
        (is_block, ["blocks.0", "blocks.1", "blocks.2"]),
        (lambda name, module: name == "", [""]),
        (None, None),
    ],
)
def test_names_globs_and_predicates(choice: Any, names: list[str] | None):
    assert select_modules(make(), choice) == names


@pytest.mark.parametrize("choice", ["blocks.*", is_block, ["blocks.0", "blocks.1", "blocks.2"]])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_plan_has_the_named_regions(choice: Any, rounds: int):
    plan = autoac.plan(make(rounds=rounds), batch(), 10**9, regions=choice)
    calls = ["", *(f"#{i}" for i in range(1, rounds))]
    assert [region.name for region in plan.regions] == [
        f"blocks.{i}{call}" for call in calls for i in range(3)
    ]


def test_solve_takes_names():
    profile = autoac.profile(make(), batch())
    for names, expected in (("blocks.1", ["blocks.1"]), (("blocks.0", "head"), ["blocks.0", "head"])):
        assert [region.name for region in autoac.solve(profile, 10**9, regions=names).regions] == expected


def test_a_named_module_inside_another_one_is_covered_by_it():
    profile = autoac.profile(make(), batch())
    assert [profile.module_name(call) for call in named_calls(profile, ["blocks.0.up", "blocks.0", "head"])] == [
        "blocks.0", "head",
    ]  # fmt: skip


# -- while profiling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "resnet", "t5", "lstm", "unet"])
def test_lean_modules_cover_the_model_without_nesting(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = real_models.make(name).model
    lean = lean_modules(model)
    inside = [module for chosen in lean for module in chosen.modules() if module is not chosen]
    assert not lean & set(inside)
    covered = {id(p) for chosen in lean for p in chosen.parameters()}
    outside = [n for n, p in model.named_parameters() if id(p) not in covered]
    assert all(n.count(".") <= 1 for n in outside)  # parameters that the model itself or a part of it holds


class Scripted(nn.Module):
    """What TorchScript fuses and differentiates itself, with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(torch.sigmoid(x) * x + x))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(torch.sin(self.inner(x))))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_modules_are_no_regions_but_may_be_inside(how: str, engine: str):
    x = torch.linspace(-1, 1, 256 * 64).reshape(256, 64)

    def scripted() -> Any:
        made = Scripted()
        return torch.jit.script(made) if how == "script" else torch.jit.trace(made, x, check_trace=False)

    torch.manual_seed(0)
    model = nn.Sequential(scripted(), Around(scripted()), Around(scripted()), Around(nn.Linear(64, 64)))
    lean = {name for name, module in model.named_modules() if module in lean_modules(model)}
    assert not any(name.startswith(("0", "1.inner", "2.inner")) for name in lean)
    with pytest.raises(ProfilingError, match="chooses no module that is called"):
        select_modules(model, ["0", "1.inner", "2.inner"])
    for _ in range(3):  # TorchScript looks at the first steps, and then optimises
        model(x).mean().backward()
    model.zero_grad(set_to_none=True)
    profile = autoac.profile(model, x)
    plan = tight_plan(profile, engine, ["1"])
    assert "1" in {region.fqn for region in plan.regions if region.wrapped}
    report = plan.verify(model, x)
    assert report.ok
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=1e-3)
    assert report.measured_peak_bytes < report.unplanned_peak_bytes
