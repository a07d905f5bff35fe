"""Policies on real models: they hold in the plan and in the step; torch's policy functions are taken as they are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import autoac
from autoac.plans import Plan
from autoac.policies import SAVE_TOP_K, as_policies, check_modules, from_function, never_recompute
from autoac_solver.records.profile import Profile
from tests.execute.exact.harness import Case, assert_plan_exact
from tests.small_models import WIDTH, Blocks, assert_same, batch, least_bytes, make, step, tight_plan

pytestmark = pytest.mark.usefixtures("one_thread")

Policy = autoac.Policy


@pytest.fixture(params=["replay", "sac"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def profile() -> Profile:
    return autoac.profile(make(), batch())


def decided(plan: Plan, op: str, module: str = "") -> set[str]:
    frame = plan.decisions
    return set(frame[(frame["op"] == op) & frame["module"].str.startswith(module)]["decision"])


def least_with(profile: Profile, engine: str, policies: Any) -> int:
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, 1, engine=engine, policies=policies)
    return caught.value.minimum_bytes


@pytest.mark.parametrize(
    "policies",
    [
        Policy("MUST_SAVE", op="aten.relu"),
        Policy(CheckpointPolicy.MUST_RECOMPUTE, op=torch.ops.aten.relu),
        [
            Policy("MUST_SAVE", module="blocks.0"),
            Policy("MUST_RECOMPUTE", op="aten.addmm", module="blocks.1.up"),
        ],
        never_recompute("blocks.1.up"),
    ],
    ids=["save an op", "recompute an op", "by module", "never run again"],
)
def test_plans_follow_and_steps_are_exact(profile: Profile, engine: str, policies: Any):
    least = least_with(profile, engine, policies)
    most = autoac.solve(profile, 10**12).record.unplanned_peak_bytes
    for budget in (least, (least + most) // 2, 10**12):
        plan = autoac.solve(profile, budget, engine=engine, policies=policies)
        for applied in plan.record.policies:
            assert applied.values > 0
        assert plan.predicted_peak_bytes <= budget
        model = plan.apply(make())
        assert_same(step(model), step(make()))
        report = plan.verify(plan.remove(model), batch())
        assert report.ok, str(report)
        assert report.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)


def test_constraints_hold_in_the_plan(profile: Profile, engine: str):
    assert "recompute" in decided(tight_plan(profile, engine), "aten.relu.default")
    save = Policy("MUST_SAVE", op="aten.relu")
    least = least_with(profile, engine, save)
    assert least > least_bytes(profile, engine)
    assert decided(autoac.solve(profile, least, engine=engine, policies=save), "aten.relu.default") == {
        "save"
    }
    again = Policy("MUST_RECOMPUTE", op="aten.relu", module="blocks.1")
    plan = autoac.solve(profile, 10**12, engine=engine, policies=again)
    assert decided(plan, "aten.relu.default", "blocks.1") == {"recompute"}
    assert decided(plan, "aten.relu.default", "blocks.0") == {"save"}


def test_an_infeasible_budget_says_what_the_policies_cost(profile: Profile, engine: str):
    save = Policy("MUST_SAVE", op="aten.relu")
    without, with_policy = least_bytes(profile, engine), least_with(profile, engine, save)
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, with_policy - 1, engine=engine, policies=[save, Policy("PREFER_SAVE", op="*")])
    message = str(caught.value)
    assert f"the least possible peak is {with_policy} bytes" in message
    assert (
        f'with the policies Policy("MUST_SAVE", op="aten.relu"); without them the least is {without} bytes'
        in message
    )
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, without - 1, engine=engine, policies=Policy("PREFER_SAVE", op="*"))
    assert "policies" not in str(caught.value)


def test_hints_decide_between_values(profile: Profile, engine: str):
    """Where the relu of either block can be kept, a hint says of which."""
    regions, blocks = ["blocks.0", "blocks.1"], ("blocks.0", "blocks.1")

    def least_keeping(block: str) -> int:
        policy = Policy("MUST_SAVE", op="aten.relu", module=block)
        with pytest.raises(autoac.InfeasibleBudgetError) as caught:
            autoac.solve(profile, 1, engine=engine, regions=regions, policies=policy)
        return caught.value.minimum_bytes

    budget = max(map(least_keeping, blocks))
    for block in blocks:
        hint = Policy("PREFER_SAVE", op="aten.relu", module=block, weight=1e4)
        plan = autoac.solve(profile, budget, engine=engine, policies=hint, regions=regions)
        assert "recompute" not in decided(plan, "aten.relu.default", block)
        assert plan.record.predicted_extra_s == pytest.approx(plan.predicted_overhead * profile.step_s)
        assert (plan.record.hint_s, plan.record.policies[0].followed) == (0, 1)
    weak = Policy("PREFER_RECOMPUTE", op="*", weight=1)
    assert autoac.solve(profile, 10**12, engine=engine, policies=weak).record.predicted_extra_s == 0


def test_in_words_and_in_files(profile: Profile, engine: str, tmp_path: Path):
    policies = [Policy("MUST_SAVE", op="aten.relu"), Policy("PREFER_SAVE", module="blocks.0"), SAVE_TOP_K]
    least = least_with(profile, engine, policies)
    plan = autoac.solve(profile, least, engine=engine, policies=policies)
    text = plan.explain()
    assert 'Policy("MUST_SAVE", op="aten.relu"): 3 values' in text
    assert "SAVE_TOP_K: MUST_SAVE: 0 values" in text
    assert "those that were not followed count as" in text
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.record.policies == plan.record.policies
    assert (loaded.record.hint_s, loaded.explain()) == (plan.record.hint_s, text)
    assert "policy " not in tight_plan(profile, engine).explain()


def test_over_a_range_of_budgets(profile: Profile, engine: str):
    save = Policy("MUST_SAVE", op="aten.relu")
    curve = autoac.tradeoff(profile, points=3, engine=engine, policies=save)
    assert curve.frame["budget_bytes"][0] == least_with(profile, engine, save)
    for plan in curve.plans:
        assert "recompute" not in decided(plan, "aten.relu.default")


def test_planned_in_one_call():
    plan = autoac.plan(make(), batch(), "1GB", policies=autoac.policies.never_recompute("blocks.2"))
    assert plan.record.policies[0].values > 0


def test_a_module_whose_name_has_brackets_in_it(engine: str):
    """It is meant by its name, though that is a glob for another one."""
    model = nn.ModuleDict({"a[0]": make()})
    profile = autoac.profile(model, lambda: model["a[0]"](batch()).square().mean().backward())
    policy = Policy("MUST_SAVE", op="aten.relu", module="a[0]")
    plan = autoac.solve(profile, 10**12, engine=engine, policies=policy)
    assert plan.record.policies[0].values > 0
    check_modules([policy], model)


# -- side effects ------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Counts its calls in Python, where nobody puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(WIDTH, WIDTH), SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made.calls += 1
        return torch.tanh(self.linear(x))


def counting() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(Counts(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def test_code_with_side_effects_runs_once(engine: str):
    profile = autoac.profile(counting(), batch())
    again = Policy("MUST_RECOMPUTE", op="aten.tanh")
    others = Policy("MUST_RECOMPUTE", op="aten.tanh", module="[02]")
    for policies, calls in (([again], 2 if engine == "sac" else 1), ([others, never_recompute("1.0")], 1)):
        plan = autoac.solve(profile, 10**12, engine=engine, regions=["0", "1", "2"], policies=policies)
        assert any(region.wrapped for region in plan.regions)
        model = plan.apply(counting())
        assert_same(step(model), step(counting()))
        assert cast("Any", model[1])[0].made.calls == calls


def test_saved_after_the_last_saved_tensor_with_early_stop_off():
    """The op that early stop would spare does not run again either where a policy says so."""

    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)).neg()  # autograd saves nothing of neg

    def tails() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Tail(), Tail(), nn.Linear(WIDTH, WIDTH))

    model = tails()
    profile = autoac.profile(model, batch())
    policies = [Policy("MUST_SAVE", op="aten.neg"), Policy("MUST_RECOMPUTE", op="aten.addmm", module="[01]")]
    plan = autoac.solve(profile, 10**12, engine="sac", policies=policies, regions=["0", "1"])
    assert [s for r in plan.regions for s in r.steps if s[0] == "aten.neg.default"] == [
        ("aten.neg.default", False)
    ] * 2
    report = plan.verify(model, batch())
    assert report.equal
    assert report.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)


# -- torch's policy functions ------------------------------------------------------------------------------------------


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in matmuls else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_policy_function_of_torchs(profile: Profile, engine: str):
    least = least_with(profile, engine, save_products)
    plan = autoac.solve(profile, least, engine=engine, policies=save_products)
    assert "recompute" not in decided(plan, "aten.addmm.default")
    names = [str(applied.policy) for applied in plan.record.policies]
    assert names[0] == "save_products: MUST_SAVE of 1 ops"
    assert "PREFER_RECOMPUTE" in names[1]
    assert_same(step(plan.apply(make())), step(make()))


def test_policies_and_functions_stack(profile: Profile):
    with pytest.raises(
        autoac.PolicyConflictError, match=r"op=\"aten.addmm\"\) and save_products: MUST_SAVE of 1 ops"
    ):
        autoac.solve(profile, 10**12, policies=[save_products, Policy("MUST_RECOMPUTE", op="aten.addmm")])


def test_answers_in_true_and_false():
    found = from_function(lambda ctx, op: "mm" in str(op), ["aten.mm.default", "aten.relu.default"])
    assert {(p.decision, p.op) for p in found} == {
        ("MUST_SAVE", ("aten.mm.default",)),
        ("PREFER_RECOMPUTE", ("aten.relu.default",)),
    }


def every_second(ctx: Any, op: Any) -> bool:
    every_second.calls = getattr(every_second, "calls", 0) + 1  # type: ignore[attr-defined]
    return bool(every_second.calls % 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (every_second, "every_second does not always say the same about aten"),
        (lambda ctx, op, *args: args[0].numel() > 5, "asked about aten.* without arguments .*IndexError"),
        (lambda ctx, op: ctx.op_output.numel() > 5, "without arguments .*AttributeError"),
        (lambda ctx, op: "MUST_SAVE", "answers 'MUST_SAVE' about aten.* not a CheckpointPolicy"),
        (lambda ctx, op: CheckpointPolicy.MUST_CPU_OFFLOAD, "decision='MUST_CPU_OFFLOAD'"),
        (["MUST_SAVE"], "policies= holds a str"),
        (Policy("MUST_SAVE", module="nothing"), "is about nothing in the profiled step"),
    ],
)
def test_refused(profile: Profile, given: Any, message: str):
    with pytest.raises(autoac.PolicyError, match=message):
        autoac.solve(profile, 10**12, policies=given)


def test_an_op_that_is_not_registered():
    with pytest.raises(autoac.PolicyError, match="which is not registered here"):
        from_function(save_products, ["elsewhere.op.default"])


def test_one_policy_or_several(profile: Profile):
    one = Policy("MUST_SAVE", op="*")
    assert (
        as_policies(one, profile)
        == as_policies([one], profile)
        == as_policies(iter([one]), profile)
        == (one,)
    )
    assert as_policies((), profile) == ()


def test_random_policies_stay_exact(engine: str):
    """Gradients do not depend on what policies ask for."""
    case = Case(lambda: Blocks(dropout=0.3), lambda model: model(batch()).square().mean(), ("blocks.*",))
    profile = case.profile()
    ops = ["aten.relu", "aten.addmm", "aten.native_layer_norm", "aten.mul", "aten.add"]
    generator = torch.Generator().manual_seed(3)
    done = 0
    for _ in range(8):
        picks = torch.randint(0, 5, (len(ops),), generator=generator).tolist()
        decisions = ["MUST_SAVE", "MUST_RECOMPUTE", "PREFER_SAVE", "PREFER_RECOMPUTE", ""]
        policies = [
            Policy(decisions[k], op=op, weight=3) for op, k in zip(ops, picks, strict=True) if decisions[k]
        ]
        try:
            plan = autoac.solve(profile, 10**12, engine=engine, policies=policies)
        except autoac.PolicyConflictError:
            continue
        assert_plan_exact(case, plan)
        done += 1
    assert done >= 4


def test_the_example_of_the_docs():
    """As it stands there."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.up, self.down = (
                nn.Linear(WIDTH, 2),
                nn.Linear(WIDTH, 64),
                nn.Linear(64, WIDTH, bias=False),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, choice = self.router(x).topk(1, dim=-1)
            return x + weight * self.down(nn.functional.gelu(self.up(x))) * choice.sign()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    page = (Path(__file__).resolve().parents[1] / "docs" / "guides" / "policies.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"autoac": autoac, "torch": torch, "model": Model(), "sample": batch()}
    exec(example, names)
    plan = names["plan"]
    assert [str(applied.policy) for applied in plan.record.policies][:2] == ["SAVE_COLLECTIVES", "SAVE_TOP_K"]
    assert [applied.values for applied in plan.record.policies] == [0, 2, 2, 1, 2]
    assert decided(plan, "aten.gelu.default", "layers.0") == {"recompute"}
    assert plan.verify(names["model"], batch()).equal


def test_why_of_a_module_that_is_no_region_because_others_were_asked_for():
    plan = autoac.plan(make(blocks=2), batch(), 10**9, regions=["blocks.0"])
    assert plan.why("blocks.1") == (
        "blocks.1: is no region: this plan's regions, named by regions= or chosen by the planner, are 'blocks.0'; name "
        "it in regions= to make it one"
    )
    assert plan.why("blocks.0").startswith("blocks.0: is a region")
    assert plan.why("blocks") == (
        "'blocks' is a container, which is not called itself; decisions are on 'blocks.0', 'blocks.1'"
    )


def test_ops_given_as_a_set_are_in_the_same_order_in_each_process():
    """Else a saved plan would be taken for one with other policies."""
    assert autoac.Policy("MUST_SAVE", op={"aten.mm", "aten.addmm", "aten.bmm"}).op == (
        "aten.addmm",
        "aten.bmm",
        "aten.mm",
    )
