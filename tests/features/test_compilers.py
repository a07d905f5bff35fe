"""Compilers and higher-order ops: compiled autograd, regional compilation, `flex_attention`, `torch.cond`."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import autoac
from autoac.measure import measure_peak, unique_storage_bytes
from autoac.plans import Plan
from autoac.step.modules import select_modules
from autoac.step.uncompiled import to_uncompile
from autoac_solver.records.profile import Profile
from tests.blocks import REGIONS, X, all_but_gelu, blocks, mean_square
from tests.execute.exact.harness import Case, assert_exact, differences, plan_with, planned, plans, run
from tests.features.feature import feature
from tests.small_models import least_bytes

# -- compilers and higher-order ops ------------------------------------------------------------------------------------


QUIET = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]
"""Torch's compiler warns about what it does itself."""


def quiet(test: Any) -> Any:
    for mark in QUIET:
        test = mark(test)
    return test


@quiet
@pytest.mark.slow
@feature("compiled autograd: same gradients")
def test_compiled_autograd(engine):
    import torch._dynamo.compiled_autograd

    case = Case(blocks, mean_square, REGIONS)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        loss = mean_square(model)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(case.model())
    found = gradients(planned(case, plan_with(case, engine, all_but_gelu)))
    assert len(found) == 12
    assert all(map(torch.equal, found, expected))
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


@quiet
@pytest.mark.slow
@feature("compiled autograd: memory saved, its graph run as captured")
def test_memory_under_compiled_autograd(engine):
    """Unpack hooks fire one by one. `torch.compile` would break the graph at each, and its frames hold what it gave."""
    import torch._dynamo.compiled_autograd

    def peak(model: nn.Module) -> int:
        def run_once() -> None:
            model.zero_grad(set_to_none=True)
            loss = mean_square(model)
            with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
                loss.backward()

        run_once()
        model.zero_grad(set_to_none=True)
        return measure_peak(run_once, torch.device("cpu")).peak_above_start_bytes

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Mlp() for _ in range(8)))

    def mean_square(model: nn.Module) -> torch.Tensor:
        return model(x).square().mean()

    x = torch.randn(256, 64)
    profile = autoac.profile(make(), x, loss=lambda output: output.square().mean())
    plan = autoac.solve(profile, least_bytes(profile, engine), engine=engine)
    assert peak(plan.apply(make())) < 0.8 * peak(make())
    torch._dynamo.reset()


@quiet
@pytest.mark.slow
@feature("regional compilation: compiled modules inside regions, which run uncompiled")
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_module_inside_a_region(engine, backend):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return torch.tanh(F.gelu(self.linear(torch.sin(x))))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.linear = Inner(), nn.Linear(64, 64)

        def forward(self, x):
            return torch.sin(torch.tanh(self.linear(self.inner(torch.cos(x)))))

    def build() -> nn.Module:
        model = nn.Sequential(Outer(), Outer())
        for outer in model.modules():
            if isinstance(outer, Inner):
                outer.compile(backend=backend)
        return model

    case = Case(build, mean_square, ("0", "1"))
    for recomputed in (lambda region, op, nth: True, lambda region, op, nth: "tanh" not in op):
        plan = plan_with(case, engine, recomputed)
        assert not differences(run(case, plan), run(case))
    x = torch.randn(256, 64)
    model = build()
    model(x).mean().backward()  # compiled before it is planned
    model.zero_grad(set_to_none=True)
    profile = autoac.profile(model, x)
    plan = autoac.solve(profile, least_bytes(profile, engine, ["0", "1"]), engine=engine, regions=["0", "1"])
    report = plan.verify(model, x)
    assert report.ok
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=1e-3)
    torch._dynamo.reset()


def compiled_blocks(wrapped: bool, **options: Any) -> nn.Sequential:
    """Blocks that have been compiled, and have run."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(4)))
    for index, block in enumerate(model):
        if wrapped:
            model[index] = torch.compile(block, backend="aot_eager", **options)  # type: ignore[call-overload]
        else:
            block.compile(backend="aot_eager", **options)
    model(SAMPLE).mean().backward()
    model.zero_grad(set_to_none=True)
    return model


SAMPLE = torch.linspace(-1, 1, 256 * 64).reshape(256, 64)


def compiled_plan(model: nn.Module, engine: str, capfd: pytest.CaptureFixture[str]) -> Plan:
    capfd.readouterr()
    profile = autoac.profile(model, SAMPLE)
    assert capfd.readouterr() == ("", "")
    (note,) = (note for note in profile.notes if "compiled" in note)
    assert note.startswith(
        "compiled by torch.compile, but recorded uncompiled: '0', '1', '2', '3'. With a plan of "
    )
    least = least_bytes(profile, engine)
    plan = autoac.solve(profile, least + (profile_peak(profile) - least) // 3, engine=engine)
    assert {region.wrapped for region in plan.regions} == {True, False}
    return plan


def profile_peak(profile: Profile) -> int:
    return autoac.solve(profile, 10**12).record.unplanned_peak_bytes


@quiet
@feature("regional compilation: regions compiled before the plan", "replay", cell="yes, they run uncompiled")
@pytest.mark.parametrize("wrapped", [False, True], ids=["in place", "wrapped"])
@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
def test_regions_compiled_before_the_plan(wrapped, fullgraph, capfd):
    model = compiled_blocks(wrapped, fullgraph=fullgraph)
    before = [dict(vars(module)) for module in model.modules()]
    plan = compiled_plan(model, "replay", capfd)
    report = plan.verify(model, SAMPLE)
    assert report.ok
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=1e-4)
    plan.apply(model)
    copied = copy.deepcopy(model)
    steps = [gradients(model)]
    if not (
        wrapped and fullgraph
    ):  # the copy of a wrapper compiles anew, and breaks its graph around each region
        steps += [gradients(copied), gradients(pickle.loads(pickle.dumps(copied)))]
    plan.remove(copied)
    plan.remove(model)
    for step in (*steps, gradients(copied)):
        assert all(map(torch.equal, step, gradients(model)))
    model.zero_grad(set_to_none=True)
    assert [dict(vars(module)) for module in model.modules()] == before
    torch._dynamo.reset()


@quiet
@pytest.mark.slow
@feature(
    "regional compilation: regions compiled before the plan", "sac", cell="yes, peak only about as predicted"
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["in place", "wrapped"])
def test_regions_compiled_before_the_plan_under_sac(wrapped, capfd):
    model = compiled_blocks(wrapped)
    plan = compiled_plan(model, "sac", capfd)
    report = plan.verify(model, SAMPLE)
    assert report.equal
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.05)
    assert report.measured_peak_bytes < 0.9 * report.unplanned_peak_bytes
    torch._dynamo.reset()


def test_fullgraph_over_a_replay_plan_says_what_to_do():
    model = nn.Sequential(Mlp(), Mlp())
    profile = autoac.profile(model, SAMPLE)
    plan = autoac.solve(profile, least_bytes(profile, "replay"), engine="replay")
    plan.apply(model)
    with pytest.raises(Unsupported, match=r"fullgraph=True cannot be met.* engine='sac'"):
        torch.compile(model, backend="eager", fullgraph=True)(SAMPLE)
    torch._dynamo.reset()


@quiet
def test_a_plan_that_is_applied_again_is_not_compiled_again():
    """Torch stops compiling a function after eight times."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    profile = autoac.profile(model, SAMPLE)
    plan = autoac.solve(profile, least_bytes(profile, "sac"), engine="sac")
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    for block in model:
        block.compile(backend=backend)
    counts = []
    for _ in range(3):
        with plan.applied(model):
            gradients(model)
        counts.append(len(compiled))
    assert counts[0] == counts[-1] > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("copied", [False, True])
def test_a_larger_batch_of_a_model_that_is_compiled_as_a_whole_warns(copied: bool):
    """Dynamo's guard on the inputs' size compiles the model anew, and that says so; it was silent."""
    model = nn.Sequential(Mlp(), Mlp())
    profile = autoac.profile(model, SAMPLE)
    plan = autoac.solve(profile, least_bytes(profile, "sac"), engine="sac")
    plan.apply(model)
    model = copy.deepcopy(model) if copied else model
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    larger = torch.cat([SAMPLE, SAMPLE])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*plan was made.*")
        for rows in (8, 4, 6):  # from the second size on with dynamic shapes
            compiled(SAMPLE[:rows]).sum().backward()
        assert counter.frame_count == 2
        with torch.no_grad():
            compiled(larger)
    with pytest.warns(UserWarning, match="is compiled for inputs that are larger than float32"):
        compiled(larger).sum().backward()
    frames = counter.frame_count
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*plan was made.*")
        compiled(torch.cat([larger, SAMPLE])).sum().backward()  # once
    assert counter.frame_count == frames
    torch._dynamo.reset()


def test_a_wrapper_named_as_a_region_stands_for_its_module():
    model = nn.Sequential(Mlp(), Mlp())
    model[1] = torch.compile(model[1])  # type: ignore[call-overload]
    assert select_modules(model, "*") == select_modules(model, ["0", "1"]) == ["0", "1._orig_mod"]
    assert select_modules(model, "1") == ["1._orig_mod"]


def test_what_runs_uncompiled():
    compiled = ["0", "1.inner", "2"]
    assert to_uncompile(compiled, [], eager_only=True) == []
    assert to_uncompile(compiled, ["1"], eager_only=True) == compiled
    assert to_uncompile(compiled, ["0", "1", "2.inner"], eager_only=False) == ["1.inner"]
    assert to_uncompile(["", "1.inner"], ["1"], eager_only=False) == []
    assert to_uncompile(["1.inner"], [""], eager_only=False) == ["1.inner"]


@quiet
def test_a_module_compiled_anew_under_a_plan_stays_so(capfd):
    model = compiled_blocks(wrapped=False)
    plan = compiled_plan(model, "replay", capfd)
    plan.apply(model)
    model[0].compile(backend="eager")
    anew = model[0]._compiled_call_impl
    plan.remove(model)
    assert model[0]._compiled_call_impl is anew
    assert model[1]._compiled_call_impl is not None
    torch._dynamo.reset()


@quiet
def test_a_compiled_function_is_noted_and_may_call_the_model(capfd, monkeypatch):
    model = nn.Sequential(Mlp(), Mlp())
    step = torch.compile(lambda: model(SAMPLE).square().mean(), backend="aot_eager")
    step().backward()
    model.zero_grad(set_to_none=True)
    capfd.readouterr()
    profile = autoac.profile(model, lambda: step().backward())
    assert {call.fqn for call in profile.calls} >= {"0", "1"}
    assert "ignored" not in capfd.readouterr().err
    model[1] = Calls(torch.compile(F.gelu))  # its kernels run no ops that a mode sees
    monkeypatch.setattr("autoac.record.tape.storages._OWN_FROZEN", 10**9)  # the tests freeze objects
    profile = autoac.profile(model, SAMPLE)
    assert profile.notes[0].startswith(
        "functions compiled by torch.compile run in '1': what they keep and take is not seen"
    )
    # What compiled code has made in the step was not there before it.
    assert profile.resident_bytes == unique_storage_bytes([*model.parameters(), SAMPLE])
    torch._dynamo.reset()


class Masked(nn.Module):
    """Gives its blocks a mask while it is being compiled, as transformers' decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(x) if torch.compiler.is_compiling() else None
        for block in self.blocks:
            x = block(x) if mask is None else block(x * mask)
        return x


@quiet
def test_a_plan_for_eager_ops_finds_them_in_a_compiled_model():
    """The recorded step ran uncompiled, and so do those under the plan, all of the model."""
    model = Masked()
    compiled: Any = torch.compile(model, backend="eager")
    expected = gradients(model)
    profile = autoac.profile(compiled, SAMPLE)
    plan = autoac.solve(profile, least_bytes(profile, "replay"), engine="replay")
    with plan.applied(compiled):
        for _ in range(2):
            assert all(map(torch.equal, gradients(compiled), expected))
        assert not plan.is_not_followed
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    compiled(SAMPLE)
    assert seen == [True]
    torch._dynamo.reset()


@quiet
def test_a_loop_of_a_model_that_is_compiled_without_graph_breaks(engine):
    """With `fullgraph=True` a compiled model refuses to run uncompiled, as the recorded step does."""

    def trained(budget: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inner = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        )
        model: Any = torch.compile(inner, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        handle = None if budget is None else autoac.auto(model, budget, engine=engine)
        for step in range(4):
            model(torch.full((32, 16), float(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            assert handle.plan is not None
            handle.remove()
        torch._dynamo.reset()
        return [*inner.parameters()]

    assert all(map(torch.equal, trained(10**9), trained(None)))


@quiet
def test_in_a_compiled_method_the_compiler_traces_no_code_of_ours(engine):
    """It would trace each frame below a method that it could not compile: our dispatch modes and hooks."""
    from torch._dynamo import convert_frame

    torch.manual_seed(0)
    model = nn.Sequential(*(InTwo() for _ in range(4)))
    expected = gradients(model)
    first, second = model[0], model[1]
    assert isinstance(second, InTwo)
    first.forward = torch.compile(first.forward, backend="aot_eager")
    second.run = torch.compile(second.run, backend="aot_eager")
    profile = autoac.profile(model, SAMPLE)
    plan = autoac.solve(profile, least_bytes(profile, engine), engine=engine)
    with plan.applied(model):
        assert all(map(torch.equal, gradients(model), expected))
        assert all(map(torch.equal, gradients(model), expected))
    traced = [code for reference in convert_frame.input_codes.seen if (code := reference()) is not None]
    torch._dynamo.reset()
    assert traced
    assert not [f"{code.co_filename}:{code.co_name}" for code in traced if "/autoac/" in code.co_filename]


@quiet
@torch._dynamo.config.patch(recompile_limit=64)  # a form for each of the modes and hooks of a profiled step
def test_compiled_functions_of_a_region(engine):
    """They run compiled under replay, and uncompiled under sac; they are compiled again when the plan is gone."""
    torch.manual_seed(0)
    backend = CompileCounterWithBackend("aot_eager")
    activation = torch.compile(lambda x: F.gelu(x) * x, backend=backend, fullgraph=True)
    model = nn.Sequential(*(nn.Sequential(Mlp(), Calls(activation)) for _ in range(4)))
    expected = gradients(model)
    profile = autoac.profile(model, SAMPLE)
    plan = autoac.solve(profile, least_bytes(profile, engine), engine=engine)
    assert any(region.wrapped for region in plan.regions)

    def compiles() -> bool:
        """Whether a step compiles the function, which Dynamo has forgotten; not what it is to skip for good."""
        found = backend.frame_count
        torch._dynamo.reset()
        assert all(map(torch.equal, gradients(model), expected))
        return backend.frame_count > found

    with plan.applied(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sac: other ops than in the profiled step
        found = [compiles() for _ in range(3)]
    every = all(region.wrapped for region in plan.regions)
    assert found == [engine == "replay" or not every] * 3
    assert compiles()
    torch._dynamo.reset()


class InTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), Mlp()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.norm(x))


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x.sin())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of one step."""
    model.zero_grad(set_to_none=True)
    model(SAMPLE).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@quiet
@feature("regional compilation: regions compiled after `apply`")
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_region(engine, backend):
    case = Case(blocks, mean_square, REGIONS)
    plan = plan_with(case, engine, all_but_gelu)
    model = planned(case, plan)
    for block in model:
        block.compile(backend=backend)
    torch.manual_seed(3)
    mean_square(model).backward()
    plain = case.model()
    torch.manual_seed(3)
    mean_square(plain).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    torch._dynamo.reset()


@quiet
def test_regions_that_are_alike_are_compiled_once_under_sac():
    """Otherwise the ninth would reach the compiler's limit, and all from there on would run uncompiled."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(24)))
    profile = autoac.profile(model, SAMPLE)
    least, most = least_bytes(profile, "sac"), autoac.solve(profile, 2**40, engine="sac").predicted_peak_bytes
    plan = autoac.solve(profile, (least + most) // 2, engine="sac")
    wrapped = [region.steps for region in plan.regions if region.wrapped]
    assert len(wrapped) > torch._dynamo.config.recompile_limit
    expected = gradients(model)
    plan.apply(model)
    backend = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=backend)
    assert all(map(torch.equal, gradients(model), expected))
    found = backend.frame_count
    torch._dynamo.reset()
    # One for those that are not wrapped; and one more where the input needs no gradient.
    assert found <= len(set(wrapped)) + 2


@quiet
@pytest.mark.slow
@feature("regional compilation: regions compiled after `apply`")
def test_memory_of_regions_compiled_after_apply(engine):
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(4)))
    profile = autoac.profile(model, SAMPLE)
    plan = autoac.solve(profile, least_bytes(profile, engine), engine=engine)
    expected = gradients(model)
    plan.apply(model)
    for block in model:
        block.compile(backend="aot_eager")
    assert all(map(torch.equal, gradients(model), expected))
    model.zero_grad(set_to_none=True)

    def step() -> None:
        output = model(SAMPLE)
        output.mean().backward()

    peak = plan.resident_bytes + measure_peak(step).peak_above_start_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.05)
    torch._dynamo.reset()


class Flex(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (t.unflatten(2, (2, 16)).transpose(1, 2) for t in self.qkv(torch.sin(x)).chunk(3, -1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow where it is not compiled
            y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -1e9))
        return torch.sin(F.gelu(self.out(y.transpose(1, 2).flatten(2))))


@feature("higher-order ops: `flex_attention` on CPU", cell="refused")
def test_flex_attention_on_cpu(engine):
    """By torch, which has no backward of it there; with a plan as without. Without gradients it runs."""
    x = X.reshape(8, 16, 32)
    case = Case(lambda: nn.Sequential(Flex(), Block32()), lambda m: m(x).square().mean(), ("1",))
    with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
        run(case)
    with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
        autoac.profile(case.model(), x)
    frozen = Case(lambda: nn.Sequential(Frozen(Flex()), Block32(), Block32()), case.forward, ("1", "2"))
    assert_exact(frozen, engine)


@feature("higher-order ops: `flex_attention` on CUDA")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_attention_on_cuda(engine):
    x = X.reshape(2, 64, 32).cuda()
    case = Case(lambda: nn.Sequential(Flex(), Flex()).cuda(), lambda m: m(x).square().mean(), ("0", "1"))
    for plan in plans(case, engine, [0.0, 0.5]).values():
        assert not differences(run(case, plan), run(case))


class Block32(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return torch.sin(torch.tanh(self.linear(F.gelu(self.linear(torch.cos(x))))))


class Frozen(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.no_grad():
            return self.inner(x)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = torch.tanh(self.linear(torch.sin(x)))
        y = torch.cond(y.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos(), (y,))
        return torch.sin(F.gelu(y))


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.sin(F.gelu(torch.tanh(self.linear(torch.sin(x)))))


BRANCHES = Case(lambda: nn.Sequential(Branch(), Branch()), mean_square, ("0", "1"))


@quiet
@feature("higher-order ops: `torch.cond`", "replay")
def test_cond():
    assert_exact(BRANCHES, "replay", compiles=True)
    torch._dynamo.reset()


@quiet
@feature("higher-order ops: `torch.cond`", "sac", cell="left alone, `plan.why` says it")
def test_cond_under_sac():
    """Torch's selective checkpointing has no rule for it: its error would come in the first planned step."""
    case = Case(lambda: nn.Sequential(Branch(), Beside()), mean_square, ("0", "1"))
    plan = assert_exact(case, "sac")[0.0]
    assert [region.fqn for region in plan.regions if region.wrapped] == ["1"]
    assert "it runs a higher-order op (`torch.cond`, say)" in plan.why("0")
    torch._dynamo.reset()
