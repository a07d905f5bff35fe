"""What needs no ranks: plans for ranks that are not there, refusals, what is gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import autoac
from autoac.measure import measure_peak
from autoac.parallel import DDP, FSDP2, ParallelError, TensorParallel, agree, one_plan
from autoac.parallel.fsdp2 import chosen_units
from autoac.parallel.sizes import by_world_size, held
from autoac.ranks.all_or_none import together
from autoac.torch_private import default_store
from autoac_solver.build.built import Built
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.profile import BUCKETS, NEVER, VARIES, Profile
from tests.parallel.models import Block, Net, batch, make
from tests.parallel.offloaded import device_table

UNITS = ["layers.*", "pair.*"]
BLOCK_BYTES = 4 * (32 * 128 * 2 + 128 + 32 + 64)


def sharded_profile(blocks: int = 3, **options: Any) -> Profile:
    return autoac.profile(make(blocks), batch(), mode="fake", parallel=FSDP2(units=UNITS, **options))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return sharded_profile(world_size=4)


def built_for(profile: Profile, budget: int, engine: str) -> tuple[autoac.Plan, Built]:
    plan = autoac.solve(profile, budget, engine=engine)
    return plan, step_of(plan.record).built


def test_units_are_gathered_for_their_own_forward_and_backward(profile: Profile):
    gathered = [storage for storage in profile.storage_table if storage.is_gathered]
    sizes = [storage.bytes for storage in gathered]
    # Of the five blocks, the weights of two layers and the norm's, each twice.
    assert sum(sizes) == 2 * 5 * BLOCK_BYTES + 2 * 4 * (32 * 32 + 32)
    assert all(storage.alloc != NEVER and storage.free < profile.end for storage in gathered)


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_no_plan_keeps_a_gathered_parameter_alive(profile: Profile, engine: str):
    """In the planned step each life of it begins and ends where FSDP2 gathers it and gives it up."""
    loose, _ = built_for(profile, 10**9, engine)
    plan, built = built_for(profile, int(0.75 * loose.predicted_peak_bytes), engine)
    assert any(region.wrapped for region in plan.regions)
    gathered = [index for index, storage in enumerate(profile.storage_table) if storage.is_gathered]
    lifetimes = [life for life in built.problem.lifetimes if life.storage in gathered]
    assert sorted(life.storage for life in lifetimes) == gathered
    assert not any(life.extensions for life in lifetimes)
    assert not any(saved.storage in gathered for saved in profile.saved)
    most = 2 * BLOCK_BYTES + 2 * 4 * (32 * 32 + 32)  # a unit, and the root's, which stay
    assert plan.peak_parts()["gathered"] <= most
    assert sum(plan.peak_parts().values()) == plan.predicted_peak_bytes


def test_more_ranks_hold_less():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    numel = sum(p.numel() for p in model.parameters())
    parts = {}
    for size in (2, 16):
        plan = autoac.plan(
            model,
            batch(),
            "1GB",
            optimizer=optimizer,
            mode="fake",
            parallel=FSDP2(size, UNITS),
            device="h200",
        )
        parts[size] = plan.peak_parts()
        assert plan.record.device == "cuda"
    for size, found in parts.items():
        # CUDA's allocator rounds each tensor up to 512 bytes.
        tensors = len(list(model.parameters()))
        assert 4 * numel / size <= found["parameters"] <= 4 * numel / size + 512 * tensors
        assert 8 * numel / size <= found["optimizer"] <= 8 * numel / size + 1024 * tensors
    assert parts[16]["gathered"] == parts[2]["gathered"]


def test_parameters_that_stay_gathered_take_more(profile: Profile):
    kept = sharded_profile(world_size=4, reshard_after_forward=False)
    assert autoac.solve(kept, "1GB").predicted_peak_bytes > autoac.solve(profile, "1GB").predicted_peak_bytes


def test_the_model_is_left_as_it_was_and_takes_the_plan(profile: Profile):
    model = make()
    kinds = [type(module) for module in model.modules()]
    before = [parameter.clone() for parameter in model.parameters()]
    plan = autoac.plan(model, batch(), "1GB", mode="fake", parallel=FSDP2(world_size=8))
    assert [type(module) for module in model.modules()] == kinds
    assert all(map(torch.equal, before, model.parameters()))
    assert not torch.distributed.is_initialized()
    plan.apply(model)
    assert "no region" in plan.explain()
    assert "layers.0" in plan.why("")


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model, sample = Net(), torch.empty(128, 32)
    found = autoac.profile(model, sample, mode="fake", parallel=FSDP2(world_size=4, units=UNITS))
    assert found.resident_bytes == sharded_profile(world_size=4).resident_bytes


def test_groups_of_ranks_that_hold_all_shards():
    groups = sharded_profile(world_size=8, replicas=2)
    assert groups.resident_bytes == sharded_profile(world_size=4).resident_bytes
    assert any(op.name.startswith("c10d.allreduce_") for op in groups.tape)


SPLIT = {
    f"{block}.{name}": style()
    for block in ("layers.*", "pair.*")
    for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
}


def without_offloading(spec: FSDP2 | TensorParallel) -> dict[str, Any]:
    if isinstance(spec, FSDP2):
        return {"offload_policy": None}
    assert spec.fsdp is not None
    return {"fsdp": replace(spec.fsdp, offload_policy=None)}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    "spec",
    [
        lambda size: FSDP2(size, UNITS),
        lambda size: FSDP2(size, UNITS, reshard_after_forward=False),
        lambda size: FSDP2(size, UNITS, replicas=2),
        lambda size: TensorParallel(2, SPLIT, fsdp=FSDP2(size // 2, UNITS)),
        lambda size: FSDP2(size, UNITS, offload_policy=CPUOffloadPolicy()),
        lambda size: TensorParallel(
            2, SPLIT, fsdp=FSDP2(size // 2, UNITS, offload_policy=CPUOffloadPolicy())
        ),
    ],
    ids=["", "not resharded", "two replicas", "layers in two parts", "offloaded", "parts offloaded"],
)
def test_what_other_numbers_of_ranks_hold_is_what_they_record(
    spec: Callable[[int], FSDP2 | TensorParallel],
):
    """With the same decisions, and sizes that all of them divide."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    profiles = {
        size: autoac.profile(
            model, batch(), optimizer=optimizer, mode="fake", parallel=spec(size), device=device_table()
        )
        for size in (4, 8, 16)
    }
    loose = autoac.solve(profiles[8], "1GB")
    plan = autoac.solve(profiles[8], int(0.8 * loose.predicted_peak_bytes))
    assert any(region.wrapped for region in plan.regions)
    in_host_memory = spec(8).offloads
    found = held(spec(8), model, optimizer, profiles[8], plan.record)
    assert [one.ranks for one in found] == [4, 8, 16]
    if in_host_memory:  # as on the device, of which nothing is rounded here
        on_device = replace(spec(8), **without_offloading(spec(8)))
        assert [replace(one, peak_bytes=0) for one in found] == [
            replace(one, peak_bytes=0)
            for one in held(
                on_device,
                model,
                optimizer,
                autoac.profile(
                    model,
                    batch(),
                    optimizer=optimizer,
                    mode="fake",
                    parallel=on_device,
                    device=device_table(),
                ),
                plan.record,
            )
        ]
    for one in found:
        for kind, size in (
            ("Parameter", one.parameters_bytes),
            ("Gradient", one.gradients_bytes),
            ("Optstate", one.optimizer_bytes),
        ):
            assert (0 if in_host_memory else size) == sum(
                storage.bytes
                for storage in profiles[one.ranks].storage_table
                if storage.kind == kind and not storage.is_gathered
            )
        assert one.peak_bytes == plan.on(profiles[one.ranks]).predicted_peak_bytes
    assert [one.peak_bytes for one in held(spec(8), model, optimizer, profiles[8])] == [None] * 3
    table = by_world_size(plan, spec(8), model, optimizer, sizes=[16, 4])
    assert table.to_dict("index") == {
        one.ranks: {name: value for name, value in one.as_json().items() if name != "ranks"}
        for one in (found[0], found[2])
    }


@pytest.mark.parametrize("offload", [None, CPUOffloadPolicy()], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_grows_with_fewer_ranks_beside_gradients(replicas: int, offload: Any):
    """Reduced in a wider dtype, and cast, where the shards take most."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def spec(size: int) -> FSDP2:
        return FSDP2(size, UNITS, None, policy, replicas, offload_policy=offload)

    model, x, sizes = make(), batch(rows=2), [4, 8, 16]
    profiles = {
        size: autoac.profile(model, x, mode="fake", parallel=spec(size), device=device_table())
        for size in sizes
    }
    plan = autoac.solve(profiles[8], "1GB")
    peaks = by_world_size(plan, spec(8), model, sizes=sizes)["peak_bytes"]
    assert list(peaks) == [plan.on(profiles[size]).predicted_peak_bytes for size in sizes]
    assert peaks.is_monotonic_decreasing
    # One rank in a group gathers and reduces nothing: that is another step.
    assert list(by_world_size(plan, spec(8), model, sizes=[replicas])["peak_bytes"].isna()) == [True]


def test_one_process_has_nobody_to_agree_with():
    plan = autoac.plan(nn.Linear(4, 4), torch.randn(2, 4), "1GB")
    with pytest.raises(ParallelError, match="there are no ranks to agree with: call torch"):
        agree(plan, nn.Linear(4, 4))


def test_other_numbers_of_ranks_that_make_no_sense():
    model, spec = make(), FSDP2(8, UNITS, replicas=2)
    plan = autoac.plan(model, batch(), "1GB", mode="fake", parallel=spec)
    with pytest.raises(ValueError, match=r"3 ranks cannot shard with 2 replicas: pass positive multiples"):
        by_world_size(plan, spec, model, sizes=[3])
    with pytest.raises(
        ValueError, match="spec keeps the shards in host memory, and those of the plan's step are"
    ):
        by_world_size(plan, replace(spec, offload_policy=CPUOffloadPolicy()), model)
    with pytest.raises(ValueError, match="another model than this Linear"):
        by_world_size(plan, spec, nn.Linear(2, 2))
    for other in (FSDP2(), TensorParallel(2)):
        with pytest.raises(ValueError, match=r"spec is .*: pass the autoac.parallel.FSDP2\(world_size=...\)"):
            by_world_size(plan, other, model)
    with pytest.raises(ValueError, match="3 ranks cannot shard with 2 ranks that split layers"):
        by_world_size(plan, TensorParallel(2, fsdp=FSDP2(4)), model, sizes=[3])


def test_units_are_gathered_ahead_in_the_models_order():
    peaks = [
        autoac.solve(sharded_profile(blocks=12, world_size=4, prefetch=ahead), "1GB").predicted_peak_bytes
        for ahead in (None, 1, 2, 4)
    ]
    assert peaks[0] == peaks[1] < peaks[2] < peaks[3]
    with pytest.raises(ValueError, match="prefetch is 0"):
        FSDP2(4, prefetch=0)


def test_half_as_many_ranks_where_that_is_a_number(profile: Profile):
    for size, replicas, expected in ((3, 1, [3, 6]), (6, 6, [6, 12]), (1, 1, [1, 2]), (8, 2, [4, 8, 16])):
        spec = FSDP2(size, UNITS, replicas=replicas)
        assert [one.ranks for one in held(spec, make(), None, profile)] == expected


def test_a_step_that_does_not_vary_is_not_said_to(profile: Profile):
    """FSDP2's first step has more ops than the others."""
    assert not [note for note in profile.notes if note.startswith(VARIES)]


def test_buckets():
    plain = autoac.profile(make(), batch())
    size = sum(4 * p.numel() for p in make().parameters())
    for view in (False, True):
        found = autoac.profile(make(), batch(), parallel=DDP(gradient_as_bucket_view=view))
        [buckets] = [s for s in found.storage_table if s.name == BUCKETS]
        assert buckets.bytes == size + 8 * len(list(make().parameters()))
        grown = (
            autoac.solve(found, "1GB").predicted_peak_bytes - autoac.solve(plain, "1GB").predicted_peak_bytes
        )
        assert (grown < buckets.bytes) == view


class HasOneThatCannotBeCopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.lines = (line for line in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_buckets_count_for_the_largest_of_several_samples():
    found = autoac.profile(make(), autoac.Samples([batch(), batch()[:8]]), parallel=DDP())
    assert [s.bytes for s in found.storage_table if s.name == BUCKETS]


def test_granularity_is_refused_where_nothing_is_compiled():
    with pytest.raises(ValueError, match=r"granularity='whole' goes with engine='compile'"):
        autoac.plan(make(), batch(), "1GB", parallel=DDP(is_here=True), granularity="whole")


def test_refusals():
    model = make()
    with pytest.raises(autoac.ProfilingError, match="so no step of theirs can be run"):
        autoac.profile(model, batch(), mode="real", parallel=FSDP2(world_size=4))
    with pytest.raises(autoac.ProfilingError, match="a callable sample runs your own model"):
        autoac.profile(model, lambda: None, parallel=FSDP2(world_size=4))
    with pytest.raises(autoac.ProfilingError, match="cannot be copied"):
        autoac.profile(HasOneThatCannotBeCopied(), torch.ones(1, 2), parallel=FSDP2(world_size=4))
    with pytest.raises(autoac.ProfilingError, match=r"units='blocks.\*' matches no module"):
        autoac.profile(model, batch(), parallel=FSDP2(world_size=4, units=["blocks.*"]))
    for kind in (FSDP2, TensorParallel):
        with pytest.raises(
            ValueError, match="without world_size is a model's that is sharded, and this one is not"
        ):
            autoac.plan(model, batch(), "1GB", parallel=kind())
    with pytest.raises(ValueError, match="reshard_after_forward=2 makes groups of ranks"):
        FSDP2(world_size=8, reshard_after_forward=2)
    with pytest.raises(autoac.ProfilingError, match=r"plan=\{'layer.\*.up': ...\} matches no module of Net"):
        autoac.profile(model, batch(), parallel=TensorParallel(2, {"layer.*.up": ColwiseParallel()}))
    with pytest.raises(ValueError, match="'compile' does not plan for absent ranks"):
        autoac.plan(model, batch(), "1GB", engine="compile", parallel=FSDP2(world_size=4))
    scaled = make()
    scaled.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(autoac.ProfilingError, match=r"FSDP2 cannot be put on this model: .*scalar"):
        autoac.profile(scaled, batch(), parallel=FSDP2(world_size=4))
    with pytest.raises(ValueError, match="parallel is 'fsdp'"):
        autoac.profile(model, batch(), parallel="fsdp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="world_size is 0"):
        FSDP2(world_size=0)
    with pytest.raises(ValueError, match="must divide"):
        FSDP2(world_size=8, replicas=3)
    offloaded = FSDP2(world_size=8, offload_policy=CPUOffloadPolicy())
    with pytest.raises(autoac.ProfilingError, match="without device= the host is the device: say which GPU"):
        autoac.profile(model, batch(), parallel=offloaded)
    with pytest.raises(ValueError, match=r"offload_policy is True: pass torch.distributed.fsdp.CPUOffloadPo"):
        FSDP2(world_size=8, offload_policy=True)
    assert not torch.distributed.is_initialized()


def test_units_may_hold_others_or_be_only_the_model():
    nested = chosen_units(make(), ["pair", "pair.*"])
    assert nested == ["pair", "pair.0", "pair.1"]
    assert chosen_units(make(), []) == []
    whole, by_layer, both = (
        autoac.profile(make(), batch(), mode="fake", parallel=FSDP2(world_size=4, units=units))
        for units in ([], ["layers.*"], ["layers.*", "layers.*.up"])
    )
    assert by_layer.peak_bytes < whole.peak_bytes  # fewer parameters are gathered at once
    assert both.resident_bytes == by_layer.resident_bytes

    lists = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
    assert chosen_units(nn.ModuleDict({"stages": lists}), None) == ["stages.0.0", "stages.0.1", "stages.1.0"]


def test_a_compiled_model_is_planned_for_with_sac():
    compiled: Any = torch.compile(make())
    plan = autoac.plan(compiled, batch(), "1GB", parallel=FSDP2(world_size=4))
    assert plan.engine == "sac"


def test_torchs_checkpoint_wrapper_is_told():
    model = make()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    notes = autoac.plan(model, batch(), "1GB").notes
    assert any("torch's checkpoint_wrapper, is on 'layers.0', 'layers.1'" in note for note in notes)


class TwoRanks:
    """Rank 0 of two, and what rank 1 answers."""

    rank, members = 0, (0, 1)

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    def all(self, own: int) -> list[int]:
        return [own, self.answers.pop(0)]


def test_a_plan_under_which_another_ranks_step_exceeds_the_budget_is_made_by_that_rank(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
):
    made = autoac.solve(profile, "1GB")
    monkeypatch.setattr(one_plan, "shared", lambda ranks, owner, plan, model: plan or made)
    asked: list[int] = []
    for_all: Any = one_plan.for_all

    def plans(*answers: int) -> autoac.Plan:
        asked.clear()
        return for_all(TwoRanks(*answers), 0, make(), profile, lambda: asked.append(1) or made)

    assert plans(10**6) is made  # within the budget
    assert plans(2 * 10**9, 10**6) is made
    assert asked == [1]  # rank 1 made the second
    with pytest.raises(
        autoac.ParallelError, match="under the plan for rank 1's step, that of rank 1 takes 3 GB"
    ):
        plans(2 * 10**9, 3 * 10**9)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_plans_text_does_not_stay_in_the_store():
    with together("share a text") as ranks:
        assert ranks.from_one(0, "text") == "text"
        piece = ranks.key(1, "piece", 0)
        assert default_store().check([piece])
    assert not default_store().check([piece])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("engine", "words"), [("sac", "so this step's gradients would be wrong"), ("replay", "storage of size 0")]
)
def test_a_region_around_units_is_an_error_though_it_were_let_through(
    engine: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    """Without the refusal: parameters are not there when values are computed again, which the first step finds."""
    monkeypatch.setattr("autoac_solver.build.regions.refused_by_all", lambda *_: iter(()))
    monkeypatch.setattr("autoac.execute.attach.check_no_units", lambda *_: None)
    monkeypatch.setattr("autoac.execute.placement.check_no_units", lambda *_: None, raising=False)
    torch.manual_seed(0)
    units = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Sequential(*units[:2]), nn.Sequential(*units[2:]))
    for module in (*units, model):
        fully_shard(module)
    x, regions = torch.randn(256, 64), ["0", "1"]
    profile = autoac.profile(model, x)
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.solve(profile, 1000, engine=engine, regions=regions)
    plan = autoac.solve(profile, least.value.minimum_bytes, engine=engine, regions=regions)
    plan.apply(model)
    with pytest.raises(RuntimeError, match=words):
        model(x).square().mean().backward()


@pytest.mark.usefixtures("one_rank")
def test_buckets_that_ddp_makes_anew_within_the_recorded_step_are_counted_once():
    """Gradients are cleared after forward, as by Lightning, so the first step differs from the others."""
    model = make()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = autoac.auto(ddp, "1GB", measure=True)
    for _ in range(4):
        loss = ddp(batch()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert handle.plan is not None
    assert handle.plan.predicted_peak_bytes == handle.measured_peak_bytes


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_compiled_without_graph_breaks_inside_of_ddp():
    """With `fullgraph=True` it refuses to run uncompiled, as a recorded step does."""
    model = make(2)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    ddp = nn.parallel.DistributedDataParallel(compiled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(ddp, 10**9)
    forward = compiled.forward
    for _ in range(3):
        ddp(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.plan is not None
    handle.remove()
    assert compiled.forward is forward
    torch._dynamo.reset()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("around", [nn.Sequential, nn.ModuleList], ids=["stage", "list of stages"])
def test_a_pipeline_may_get_its_plan_before_its_first_step(around: type[nn.Module]):
    """As in a job that is started again: the schedule's setup calls each region once more than a step does."""
    from torch.distributed import pipelining

    x = batch()

    def made() -> tuple[nn.Module, Callable[[], None]]:
        module = nn.Sequential(*make().layers)
        stage = pipelining.PipelineStage(module, 0, 1, torch.device("cpu"))
        schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=lambda found, _: found.square().mean())

        def step() -> None:
            schedule.step(x, target=x)
            stage.clear_runtime_states()

        return (module if around is nn.Sequential else nn.ModuleList([module])), step

    model, step = made()
    step()
    model.zero_grad()
    profile = autoac.profile(model, step)
    plan = autoac.solve(profile, int(0.85 * autoac.solve(profile, "1GB").predicted_peak_bytes))
    planned = {region.call for region in plan.regions if region.wrapped}
    assert 0 < len(planned) < 4  # not the same for all calls
    model, step = made()
    plan.apply(model)
    step()
    model.zero_grad()
    peak_bytes = plan.resident_bytes + measure_peak(step).peak_above_start_bytes
    assert peak_bytes == plan.predicted_peak_bytes


def test_from_one_sharded_dimension_to_another_is_a_collective():
    """On a GPU, `DTensor.redistribute` calls an op of its own for it."""
    import torch.distributed.tensor

    from autoac.ops.info import is_collective, op_info

    info = op_info(torch.ops._dtensor.shard_dim_alltoall.default)
    assert not info.replayable
    assert is_collective(info.name)


def test_ranks_compare_amounts_as_bytes_and_policy_functions_by_name():
    def facts(**arguments: Any) -> dict[str, str]:
        return one_plan.facts_of(make(), **arguments)

    assert facts(budget="20GB", headroom=0) == facts(budget=20 * 10**9, headroom=0)
    assert facts(budget="80%") != facts(budget="70%")
    assert facts(policies=[autoac.policies.REPEAT_COLLECTIVES]) != facts(policies=[])
    assert facts(policies=[facts])["policies"] == str([facts.__qualname__])
    assert facts(engine="sac", max_overhead=None) != facts(engine="replay", max_overhead=None)
