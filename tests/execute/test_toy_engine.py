"""An engine of one's own: a class on the planner's side, a class on torch's side, and a line each to register them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.execute import engines
from autoac.execute.chains import Chains
from autoac.execute.sac import sac
from autoac_solver.build import engines as models
from autoac_solver.build.build import build
from autoac_solver.build.built import Built, RegionTape
from autoac_solver.build.draft import Draft
from autoac_solver.build.engine_model import NOTHING
from autoac_solver.build.engines.rerun import Rerun
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import Lifetime
from autoac_solver.records import engines as names
from autoac_solver.records.profile import Op, Profile
from tests.small_models import assert_same, batch, least_bytes, make, step


@dataclass(frozen=True, slots=True)
class ToyCosts:
    """Seconds that a call of a region takes besides its ops."""

    call: float = 1e-3


class ToyModel:
    """A region's code runs again, as under torch's selective checkpointing; only a call costs something."""

    name = "toy"
    costs: type[Any] = ToyCosts
    selects = True
    runs_code_twice = True
    one_random_state = True
    stops_early = True
    repeats = False
    compiles = False
    unsupported = NOTHING

    def build(self, profile: Profile, calls: Sequence[int]) -> Built | None:
        return None

    def refuses(self, step: Step, region: Region) -> Iterator[str]:
        if step.profile.calls[region.call].class_name == "Linear":
            yield "a toy leaves matrix products alone"

    def reruns(self, step: Step, region: Region, op: int) -> bool:
        return step.ticks[op] < region.last_save

    def again_s(self, step: Step, region: Region, ops: Sequence[int]) -> float:
        return sum(step.profile.tape[op].again_s for op in ops)

    def wanted(self, op: Op, storages: set[int]) -> bool:
        return True

    def needed(self, profile: Profile, built: Built, tape: RegionTape) -> set[int]:
        return {group for group in tape.group_of if group >= 0}

    def lifetimes(self, draft: Draft) -> Iterator[Lifetime]:
        return Rerun(draft, watches=True).lifetimes()

    def wrap_s(self, draft: Draft, region: Region) -> float:
        return draft.step.costs_of(self.name, ToyCosts).call


class Toy:
    """Runs a wrapped region under torch's selective checkpointing, and says so."""

    model: models.EngineModel = ToyModel()
    eager_only = False
    is_policy = False
    refused = ""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, program: Any, forward: Any, args: Any, kwargs: Any, module: nn.Module) -> Any:
        self.ran.append(program.region)
        return sac.run(program, forward, args, kwargs, module)

    def measure(self, chains: Chains) -> ToyCosts:
        return ToyCosts(2e-5)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    monkeypatch.setattr(models, "_ENGINES", dict(models._ENGINES))
    before = list(names.PLANNED_FOR)
    engine = Toy()
    models.register(engine.model)
    engines.register(engine)
    yield engine
    del engines.ENGINES["toy"]
    names.PLANNED_FOR[:] = before


def test_plans_for_it_are_made_applied_saved_and_verified(toy: Toy, tmp_path: Path):
    profile = autoac.profile(make(), batch(), loss=torch.sum)
    least = least_bytes(profile, "toy")
    plan = autoac.solve(profile, least + 1000, engine="toy")
    assert plan.engine == "toy"
    path = tmp_path / "plan.json"
    plan.save(path)
    plan = autoac.Plan.load(path)
    assert "engine toy" in str(plan.explain())
    assert "a toy leaves matrix products alone" in plan.why("head")
    report = plan.verify(make(), batch(), torch.sum)
    assert report.equal
    assert report.measured_peak_bytes <= plan.budget_bytes
    assert toy.ran
    model = plan.apply(make())
    toy.ran.clear()
    assert_same(step(model), step(make()))
    assert toy.ran == [region.name for region in plan.regions if region.wrapped]
    assert len(toy.ran) > 0


def test_its_costs_are_measured_and_planned_with(toy: Toy):
    profile = autoac.profile(make(), batch(), loss=torch.sum)
    assert profile.costs.keys() == {"replay", "sac", "toy"}
    assert 5e-6 <= profile.costs["toy"]["call"] <= 8e-5  # fitted to the model, by a factor of four at most
    regions = [index for index, call in enumerate(profile.calls) if call.class_name == "Block"]
    for costs, expected in (({}, 1e-3), ({"toy": {"call": 0.5}}, 0.5)):
        built = build(replace(profile, costs=costs), regions, "toy")
        assert [region.wrap_s for region in built.problem.regions] == [expected] * len(regions)
    with pytest.raises(autoac.ProfileError, match="costs of engine 'toy' for 'op', known are call"):
        build(replace(profile, costs={"toy": {"op": 1.0}}), regions, "toy")


def test_without_it_a_plan_for_it_is_refused(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = autoac.solve(autoac.profile(make(), batch(), loss=torch.sum), "1GB", engine="toy")
    plan.save(tmp_path / "plan.json")
    names.PLANNED_FOR.remove("toy")
    with pytest.raises(autoac.ProfileError, match="engine is 'toy'; possible are 'replay', 'sac'"):
        autoac.Plan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="engine is 'toy'; possible are 'auto', 'replay', 'sac'"):
        autoac.solve(autoac.profile(make(), batch(), loss=torch.sum), "1GB", engine="toy")


NAMES = {"replay", "sac", "compile", "checkpoint"}
ROOT = Path(__file__).resolve().parents[2]


def compared_names(source: str) -> Iterator[int]:
    """Lines that compare something with an engine's name, or with a list of names."""
    for node in ast.walk(ast.parse(source)):
        sides: list[ast.AST] = []
        if isinstance(node, ast.match_case):
            sides = [node.pattern]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        for part in (part for side in sides for part in (side, *ast.iter_child_nodes(side))):
            constant = part.value if isinstance(part, ast.Constant) else None
            name = part.id if isinstance(part, ast.Name) else ""
            if constant in NAMES or (name.isupper() and name.lower() in NAMES):
                yield part.lineno  # type: ignore[attr-defined]


def test_nothing_compares_an_engines_name():
    code = "engine == COMPILE\nx != 'sac'\nx in ('replay', 'auto')\nCOMPILES\nmatch x:\n    case 'sac': ..."
    assert list(compared_names(code)) == [1, 2, 3, 6]
    files = [*(ROOT / "autoac").rglob("*.py"), *(ROOT / "solver").rglob("*.py")]
    found = [
        f"{file.relative_to(ROOT)}:{line}" for file in files for line in compared_names(file.read_text())
    ]
    assert not found, f"{found}: ask the engine's model, or `compiles` in records/engines.py"
