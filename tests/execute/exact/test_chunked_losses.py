"""Cross entropy over chunks of rows: torch's bits, never over what somebody else has, and what it takes to the byte."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import to_dlpack  # pyright: ignore[reportPrivateImportUsage]

import autoac
from autoac.execute.cross_entropy import chunked
from autoac.execute.cross_entropy.chunked import can_be_chunked, chunked_cross_entropy
from autoac.execute.cross_entropy.lean import same_in_place
from autoac.execute.replay import ReplayCall
from autoac.measure import measure_peak
from autoac_solver.build.losses.cross_entropy import chunkable_losses, rows_of_a_chunk
from autoac_solver.records.errors import PolicyConflictError, PolicyError
from tests.execute.exact.harness import Case, differences, run

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
COMPUTED = [(dtype, dtype) for dtype in DTYPES] + [(dtype, torch.float32) for dtype in DTYPES[2:]]
"""Dtypes of the logits and of the log-probabilities."""
ROWS, CLASSES, WIDTH = 512, 1400, 24
CHUNKED = "_ChunkedCrossEntropyBackward"


def arguments(
    rows: int = ROWS, classes: int = CLASSES, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and classes, of which one row is to be ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator).mul(4).to(dtype)
    expected = torch.randint(classes, (rows,), generator=generator)
    expected[0] = -100
    return logits, expected


def torchs(logits: torch.Tensor, expected: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(logits, expected, reduction=reduction)


def ours(
    logits: torch.Tensor,
    expected: torch.Tensor,
    reduction: str = "mean",
    computed: torch.dtype | None = None,
) -> torch.Tensor:
    assert can_be_chunked(logits, None)
    return chunked_cross_entropy(logits, expected, REDUCTIONS[reduction], -100, computed)


def functions(computed: torch.dtype) -> tuple[Any, Any]:
    """Our loss and torch's, of logits that are cast first."""
    return (
        lambda logits, *args: ours(logits, *args, computed=computed),
        lambda logits, *args: torchs(logits.to(computed), *args),
    )


def gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


# -- the function ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("dtype", "computed"), COMPUTED, ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (16, 1031), (100, 33), (257, 130), (40, 5003)], ids=str)
def test_same_bits_as_torchs(
    shape: tuple[int, int], dtype: torch.dtype, computed: torch.dtype, reduction: str
):
    values, expected = arguments(*shape, dtype)
    for keep in (False, True):  # over the logits, and beside them
        found = []
        for function in functions(computed):
            leaf = values.clone().requires_grad_()
            logits = leaf * 1
            kept = logits if keep else None
            loss = function(logits, expected, reduction)
            del logits
            loss.backward(torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape).to(computed))
            assert kept is None or torch.equal(kept, values)
            found.append((loss.detach(), gradient(leaf)))
        for a, b in zip(*found, strict=True):
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_ignored_classes():
    values, expected = arguments(50, 9)
    for ignored, classes in itertools.product((0, 3, 8), (expected.clamp(min=0), torch.full((50,), 3))):
        found = []
        for chunks in (True, False):
            leaf = values.clone().requires_grad_()
            logits = leaf * 1
            loss = (
                chunked_cross_entropy(logits, classes, 1, ignored)
                if chunks
                else F.cross_entropy(logits, classes, ignore_index=ignored)
            )
            del logits
            loss.backward()
            found += [loss.detach().nan_to_num(7), gradient(leaf).nan_to_num(7)]  # nan where all are ignored
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])


def test_a_class_out_of_range():
    values, expected = arguments(50, 9)
    for wrong in (9, -1):
        classes = expected.clone()
        classes[-1] = wrong
        for function in (torchs, ours):
            with pytest.raises(IndexError, match="out of bounds"):
                function(values.clone().requires_grad_(), classes)


class Base(nn.Module):
    """Logits from a linear layer, as they are and as a view of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.x = torch.randn(ROWS // 8, 8, WIDTH)

    def forward(self) -> torch.Tensor:
        return self.linear(self.x).flatten(0, 1)


HOLDERS = {
    "nobody": lambda logits: None,
    "a variable": lambda logits: logits,
    "a list": lambda logits: [logits],
    "a view": lambda logits: logits[3:5],
    "what it is a view of": lambda logits: logits._base,
    "a detached one": lambda logits: logits.detach(),
    "an array": lambda logits: logits.detach().numpy(),
    "a slice of an array": lambda logits: logits.detach().numpy()[3:5],
    "the storage": lambda logits: logits.untyped_storage(),
    "another process": lambda logits: logits.detach().share_memory_(),
    "another library": lambda logits: to_dlpack(logits.detach()),
    "autograd": lambda logits: logits.exp().sum() + logits.square().sum(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_logits_that_somebody_has_are_not_written(holder: str, monkeypatch: pytest.MonkeyPatch):
    expected = arguments()[1]
    asked: list[bool] = []
    alone = chunked.has_its_storage_alone
    monkeypatch.setattr(
        chunked, "has_its_storage_alone", lambda tensor: asked.append(alone(tensor)) or asked[-1]
    )
    model, reference = Base(), Base()
    logits = model()
    before = logits.detach().clone()
    held = HOLDERS[holder](logits)
    address = logits.data_ptr()
    loss = ours(logits, expected)
    del logits
    loss.backward()
    assert asked == [holder == "nobody"]
    if held is not None:  # so nobody else got the memory
        there = (ctypes.c_float * before.numel()).from_address(address)
        assert torch.equal(torch.frombuffer(there, dtype=torch.float32).view_as(before), before)
    torchs(reference(), expected).backward()
    assert torch.equal(gradient(model.linear.weight), gradient(reference.linear.weight))


def test_two_losses_of_the_same_logits():
    expected = arguments()[1]
    found = []
    for function in (ours, torchs):
        model = Base()
        logits = model()
        first, second = function(logits, expected), function(logits, expected.flip(0))
        del logits
        first.backward(retain_graph=True)
        (first + second).backward()
        found.append(gradient(model.linear.weight))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("dtype", "computed"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)], ids=str
)
def test_retained_graph_and_second_derivatives(dtype: torch.dtype, computed: torch.dtype):
    values, expected = arguments(40, 33, dtype)
    found = []
    for function in functions(computed):
        leaf = values.clone().requires_grad_()
        loss = function(leaf * 1.5, expected)
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf, retain_graph=True)
        (again,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        found.append((loss, first, second, again, gradient(leaf)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][2].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batched_gradients(dtype: torch.dtype):
    values, expected = arguments(40, 33, dtype)
    rows = torch.eye(40)[:5]
    found = []
    for function in functions(torch.float32):
        leaf = values.clone().requires_grad_()
        loss = function(leaf * 1.5, expected, "none")
        found += torch.autograd.grad(loss, leaf, rows, is_grads_batched=True)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_again_after_one_that_failed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Where the logits are written already, that is said; where somebody has them, they are as they were."""
    values, expected = arguments(dtype=dtype)
    ours, torchs = functions(torch.float32)
    reference = values.clone().requires_grad_()
    torchs(reference, expected).backward()
    into = chunked._into

    def fails(*args: Any, **buffers: Any) -> None:
        into(*args, **buffers)
        raise ArithmeticError("half way")

    for keep in (False, True):
        leaf = values.clone().requires_grad_()
        logits = leaf * 1
        kept = logits if keep else None
        loss = ours(logits, expected)
        del logits
        with monkeypatch.context() as patch:
            patch.setattr(chunked, "_into", fails)
            with pytest.raises(ArithmeticError):
                loss.backward()
        if keep:
            loss.backward()
            assert torch.equal(gradient(leaf), gradient(reference))
        else:
            with pytest.raises(RuntimeError, match="failed half way"):
                loss.backward()
        del kept


def test_logits_changed_after_the_loss():
    values, expected = arguments()
    leaf = values.clone().requires_grad_()
    logits = leaf * 1
    logits.mul_(2)  # before it, it may be
    loss = ours(logits, expected)
    with torch.no_grad():
        logits[0] = 0
    with pytest.raises(
        RuntimeError, match="the logits of a cross entropy were changed in place after the loss"
    ):
        loss.backward()
    assert leaf.grad is None
    logits = leaf * 1
    logits.mul_(2)
    loss = ours(logits, expected)
    loss.backward()
    other = values.clone().requires_grad_()
    torchs(other * 2, expected).backward()
    assert torch.equal(gradient(leaf), gradient(other))


def test_what_it_is_not_for():
    values, _ = arguments()
    assert can_be_chunked(values, None)
    assert not can_be_chunked(values, torch.ones(CLASSES))
    assert not can_be_chunked(values.T.contiguous().T, None)
    assert not can_be_chunked(values[:, 1:], None)
    assert not can_be_chunked(values[:, :1].T.contiguous().T, None)
    assert not can_be_chunked(values[None, :, :, None], None)
    with torch.autograd.graph.save_on_cpu():
        assert not can_be_chunked(values, None)
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not can_be_chunked(values, None)


def test_a_device_whose_bits_depend_on_the_rows_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    values, _ = arguments()
    column = chunked._column
    model = Model()
    plan = plan_for(model, "replay")
    expected = torch.autograd.grad(model(*SAMPLE), [model.classes.weight])
    monkeypatch.setattr(
        chunked, "_column", lambda *args, **rows: column(*args, **rows).nextafter(torch.tensor(9.0))
    )
    chunked.same_by_chunks.cache_clear()
    try:
        assert not can_be_chunked(values, None)
        with pytest.warns(UserWarning, match="does not give the same bits on cpu for float32"):
            plan.apply(model)
        loss = model(*SAMPLE)
        assert CHUNKED not in nodes(loss)
        assert torch.equal(*torch.autograd.grad(loss, [model.classes.weight]), *expected)
    finally:
        monkeypatch.undo()
        chunked.same_by_chunks.cache_clear()
    assert can_be_chunked(values, None)


def test_kernels_are_tried_before_the_first_step():
    """A plan from a file, in a process that has computed no such loss."""
    model = Model()
    plan = plan_for(model, "replay")
    tries = (same_in_place, chunked.same_by_chunks)
    for tried in tries:
        tried.cache_clear()
    plan.apply(model)
    misses = [tried.cache_info().misses for tried in tries]
    assert misses == [1, 1]
    model(*SAMPLE).backward()
    assert [tried.cache_info().misses for tried in tries] == misses
    assert all(tried.cache_info().hits for tried in tries)


@pytest.mark.parametrize("name", ["", "nosuch", "manual_seed"])
def test_files_with_types_that_are_none_can_be_applied(name: str):
    plan = plan_for(Model(), "replay")
    step = dataclasses.replace(plan.record.step, log_softmax_dtypes=(name,))
    autoac.Plan(dataclasses.replace(plan.record, step=step, chunk_dtypes=(name,))).apply(Model())


@pytest.mark.parametrize("classes", [2, 1400, 100_000])
@pytest.mark.parametrize("rows", [1, 16, 17, 256, 257, 4096])
def test_chunks_are_aligned_few_and_not_too_small(rows: int, classes: int):
    chunk = rows_of_a_chunk(rows, classes)
    assert chunk == rows or (chunk % 16 == 0 and chunk < rows)
    assert rows / chunk <= 16
    assert chunk == rows or chunk * classes >= 2**16
    assert chunk < max(rows / 16, 2**16 / classes) + 16


@pytest.mark.parametrize("keep", [False, True])
def test_one_buffer_less_in_forward_and_in_backward(keep: bool):
    model, expected = Base(), arguments()[1]
    logits_bytes = ROWS * CLASSES * 4
    peaks = []
    for function in (ours, autoac.cross_entropy):

        def step(function: Any = function) -> None:
            model.linear.weight.grad = model.linear.bias.grad = None
            logits = model()
            kept = logits if keep else None
            loss = function(logits, expected)
            del logits
            loss.backward()
            del kept

        step()
        peaks.append(measure_peak(step).peak_above_start_bytes)
    buffers = 2 * rows_of_a_chunk(ROWS, CLASSES) / ROWS
    assert abs(peaks[1] - peaks[0] - logits_bytes * (1 - buffers)) < 0.02 * logits_bytes


# -- in a planned model ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Blocks, then logits that are larger than all else, and a loss.

    Args:
        where: where the loss is computed, and what becomes of the logits.
    """

    def __init__(self, where: str = "root"):
        super().__init__()
        self.where = where
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.classes, self.others = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, expected: torch.Tensor) -> Any:
        x = self.blocks(x)
        logits = self.classes(x)
        if self.where == "loss module":
            return self.loss(logits, expected)
        if self.where == "autoac's":
            return autoac.cross_entropy(logits, expected)
        if self.where == "autoac's on a device":
            with torch.device("cpu"):
                return autoac.cross_entropy(logits, expected)
        if self.where == "mean too":
            mean = logits.mean()  # goes backward last
            return F.cross_entropy(logits, expected) + 1e-2 * mean
        if self.where == "scaled":
            logits /= 2
        if self.where == "capped":
            logits = 30 * torch.tanh(logits / 30)
        if self.where == "tanh":
            logits = torch.tanh(logits)
        if self.where == "bfloat16":
            logits = logits.to(torch.bfloat16).float()
        if self.where == "mask":
            loss = F.cross_entropy(logits, expected)
            with torch.no_grad():
                logits[:, 0] = 0
            return loss, logits
        if self.where == "weighted":
            return F.cross_entropy(logits, expected, torch.ones(CLASSES))
        if self.where == "sum":
            expected = expected.clamp(min=0)
            return F.cross_entropy(logits, expected, reduction="sum", ignore_index=7)
        if self.where == "none":
            return F.cross_entropy(logits, expected, reduction="none").mean()
        if self.where == "same logits twice":
            return F.cross_entropy(logits, expected) + F.cross_entropy(logits, expected.flip(0))
        if self.where == "two heads":
            return F.cross_entropy(logits, expected) + F.cross_entropy(self.others(x), expected)
        if self.where == "one head weighted":
            other = F.cross_entropy(self.others(x), expected, torch.ones(CLASSES))
            return F.cross_entropy(logits, expected) + other
        if self.where == "checkpointed":
            return checkpoint(lambda x: F.cross_entropy(self.classes(x), expected), x, use_reentrant=False)
        loss = F.cross_entropy(logits, expected)
        if self.where == "z-loss":
            loss = loss + 1e-2 * logits.logsumexp(-1).square().mean()
        if self.where == "accuracy":
            self.right = (logits.argmax(-1) == expected).sum()
        return (loss, logits) if self.where == "returned" else loss


X = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
EXPECTED = torch.arange(ROWS) * 7 % CLASSES
EXPECTED[5] = -100
SAMPLE = X, EXPECTED

ALONE = {
    "root": True,
    "loss module": True,
    "scaled": True,
    "capped": True,
    "tanh": False,
    "bfloat16": True,
    "sum": True,
    "none": True,
    "two heads": True,
    "accuracy": True,
    "returned": False,
    "z-loss": True,
    "autoac's": True,
    "autoac's on a device": True,
}
"""Whether nobody else needs the logits in backward."""
CAST_BY_THE_USER = ("bfloat16",)
"""The user's own code makes float32 logits of half-precision ones."""
NUMBERS_BYTES = {"capped": 8, "scaled": 8, "z-loss": 8, "mean too": 8}
"""A number that a node has saved is predicted to live a little longer than it does."""
SAVE = autoac.Policy("MUST_SAVE", op="aten._log_softmax*")
RECOMPUTE = autoac.Policy("MUST_RECOMPUTE", op="aten._log_softmax*")
NOT_CHUNKED = ["mask", "mean too", "weighted", "same logits twice", "one head weighted", "checkpointed"]


def loss_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def plan_for(model: nn.Module, engine: str, budget: int | None = None, **options: Any) -> autoac.Plan:
    """The plan for a budget, the least feasible one by default."""
    profile = autoac.profile(model, SAMPLE, loss=loss_of)
    if budget is None:
        with pytest.raises(autoac.InfeasibleBudgetError) as error:
            autoac.solve(profile, 1, engine=engine, **options)
        budget = error.value.minimum_bytes
    return autoac.solve(profile, budget, engine=engine, **options)


def case(where: str, autocast: bool, regions: tuple[str, ...] = ("blocks.*",)) -> Case:
    def forward(model: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(*SAMPLE)

    return Case(lambda: Model(where), forward, regions, lambda result: loss_of(result).backward())


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("where", ALONE)
def test_exact_and_the_peak_as_predicted(where: str, autocast: bool, engine: str):
    chosen = case(where, autocast)
    model = chosen.model()
    # Also where that does not lower the peak.
    plan = autoac.solve(chosen.profile(), 10**12, engine=engine, policies=[RECOMPUTE], regions=chosen.regions)
    assert plan.record.chunked_losses
    losses = chunkable_losses(plan.record.profile)
    assert {loss.alone for loss in losses} == {ALONE[where]}
    assert {bool(loss.casts) for loss in losses} == {autocast and where not in CAST_BY_THE_USER}
    report = plan.verify(model, lambda: chosen.backward(chosen.forward(model)))
    assert report.equal
    assert abs(report.measured_peak_bytes - report.predicted_peak_bytes) <= NUMBERS_BYTES.get(where, 0)
    assert not differences(run(chosen, plan), run(chosen))
    assert CHUNKED in nodes(loss_of(chosen.forward(plan.apply(chosen.model()))))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("where", ["root", "returned"])
def test_logits_that_a_region_makes(where: str, autocast: bool, engine: str):
    """Selective checkpointing holds them if it saves them, and then they are not overwritten."""
    chosen = case(where, autocast, ("blocks.*", "classes"))
    model = chosen.model()
    casts = [autoac.Policy("MUST_RECOMPUTE", module="classes", op="aten._to_copy*")] if autocast else []
    for kind in ("MUST_SAVE", "MUST_RECOMPUTE"):
        policies = [RECOMPUTE, *casts, autoac.Policy(kind, module="classes", op="aten.addmm*")]
        plan = autoac.solve(
            chosen.profile(), 10**12, engine=engine, policies=policies, regions=chosen.regions
        )
        assert plan.record.chunked_losses
        assert plan.regions[-1].fqn == "classes"
        assert plan.regions[-1].wrapped == autocast
        report = plan.verify(model, lambda: chosen.backward(chosen.forward(model)))
        assert report.equal
        assert report.measured_peak_bytes == report.predicted_peak_bytes


@pytest.mark.parametrize("where", NOT_CHUNKED)
def test_exact_where_it_cannot_be_chunked(where: str, engine: str):
    model = Model(where)
    plan = plan_for(model, engine)
    assert not plan.record.chunked_losses
    report = plan.verify(model, SAMPLE, loss=loss_of)
    assert report.equal
    assert abs(report.measured_peak_bytes - report.predicted_peak_bytes) <= NUMBERS_BYTES.get(where, 0)
    assert CHUNKED not in nodes(loss_of(plan.apply(model)(*SAMPLE)))


def nodes(loss: torch.Tensor) -> set[str]:
    """Names of all nodes of a graph."""
    found, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            found.add(node.name())
            todo += [following for following, _ in node.next_functions]
    return found


def test_only_where_memory_is_short(engine: str):
    model = Model()
    ample = plan_for(model, engine, 10**12)
    assert not ample.record.chunked_losses
    assert "goes backward in place" in ample.explain()
    profile = ample.record.profile
    least = plan_for(model, engine)
    assert "is computed over chunks of rows" in least.explain()
    spared = autoac.solve(profile, 10**12, engine=engine, policies=[SAVE]).record
    assert least.predicted_peak_bytes < spared.unplanned_peak_bytes - 0.5 * ROWS * CLASSES * 4
    times = [
        autoac.solve(profile, budget, engine=engine).record.predicted_extra_s
        for budget in range(least.predicted_peak_bytes, spared.unplanned_peak_bytes, ROWS * CLASSES)
    ]
    assert times == sorted(times, reverse=True)


def test_a_row_of_the_decisions(engine: str):
    for budget, decision in ((None, "recompute"), (10**12, "save")):
        plan = plan_for(Model(), engine, budget)
        (row,) = plan.decisions.query("region == '(loss)'").to_dict("records")
        assert (row["op"], row["decision"], row["bytes"]) == (
            "aten._log_softmax.default",
            decision,
            ROWS * CLASSES * 4,
        )


def test_policies_about_the_loss(engine: str):
    model, regions = Model(), ["blocks.*"]
    least = plan_for(model, engine, regions=regions)
    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        plan_for(model, engine, least.predicted_peak_bytes, policies=[SAVE], regions=regions)
    assert error.value.minimum_without_policies_bytes == least.predicted_peak_bytes
    plan = plan_for(model, engine, 10**12, policies=[RECOMPUTE], regions=regions)
    assert plan.record.chunked_losses
    report = plan.verify(model, SAMPLE)
    assert report.equal
    assert report.measured_peak_bytes == report.predicted_peak_bytes
    with pytest.raises(PolicyConflictError):
        plan_for(model, engine, 10**12, policies=[RECOMPUTE, SAVE])
    nll_loss = autoac.Policy("MUST_RECOMPUTE", op="aten.nll_loss_forward*")
    with pytest.raises(PolicyError, match="is in no region"):
        plan_for(model, engine, 10**12, policies=[nll_loss], regions=regions)


def test_a_loss_inside_of_a_region_is_not_chunked(engine: str):
    model = Model()
    plan = plan_for(model, engine, regions=[""])
    assert not plan.record.chunked_losses
    report = plan.verify(model, SAMPLE)
    assert report.equal
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_a_region_that_is_the_loss_is_chunked_and_no_region(engine: str):
    plan = plan_for(Model("loss module"), engine, regions=["blocks.*", "loss"])
    assert plan.record.chunked_losses
    assert not plan.regions[-1].wrapped
    assert plan.regions[-1].fqn == "loss"


def test_saved_and_loaded(tmp_path: Any, engine: str):
    plan = plan_for(Model(), engine)
    plan.save(tmp_path / "plan.json")
    loaded = autoac.Plan.load(tmp_path / "plan.json")
    assert loaded.record.chunked_losses
    model = loaded.apply(Model())
    assert CHUNKED in nodes(model(*SAMPLE))
    assert CHUNKED in nodes(copy.deepcopy(model)(*SAMPLE))
    loaded.remove(model)
    assert CHUNKED not in nodes(model(*SAMPLE))


def test_a_users_hooks_on_what_is_saved():
    """Then the loss is not chunked, and what it saves goes where the user wants it."""
    model = Model()
    expected = torch.autograd.grad(model(*SAMPLE), [model.classes.weight])
    plan_for(model, "replay").apply(model)
    with torch.autograd.graph.save_on_cpu():
        loss = model(*SAMPLE)
    assert CHUNKED not in nodes(loss)
    assert torch.equal(*torch.autograd.grad(loss, [model.classes.weight]), *expected)


def test_logits_that_a_hook_of_the_users_keeps():
    """Kept where the profiled step did not: more memory, and the right values."""
    model, reference = Model(), Model()
    reference.load_state_dict(model.state_dict())
    plan_for(model, "replay").apply(model)
    kept: list[torch.Tensor] = []
    model.classes.register_forward_hook(lambda _module, _args, output: kept.append(output))  # type: ignore[arg-type]
    for trained in (model, reference):
        trained(*SAMPLE).backward()
    assert torch.equal(kept[0], reference.classes(reference.blocks(X)))
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(gradient(a), gradient(b))


def test_no_policies_for_a_loop_of_the_users_own():
    """Which would not compute the loss as the plan has it."""
    model = Model()
    plan = plan_for(model, "sac")
    region = next(region.name for region in plan.regions if region.wrapped)
    for ask in (plan.policy_fn, plan.context_fn):
        with pytest.raises(autoac.PlanMismatchError, match="MUST_SAVE"):
            ask(region)
    spared = plan_for(model, "sac", policies=[SAVE])
    assert spared.policy_fn(next(region.name for region in spared.regions if region.wrapped))


def test_several_micro_batches(engine: str):
    def step(model: Any) -> torch.Tensor:
        total = torch.zeros(())
        for x, expected in zip(X.chunk(2), EXPECTED.chunk(2), strict=True):
            loss = model(x, expected)
            loss.backward()
            total += loss.detach()
        return total

    model = Model()
    profile = autoac.profile(model, lambda: step(model))
    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        autoac.solve(profile, 1, engine=engine)
    plan = autoac.solve(profile, error.value.minimum_bytes, engine=engine)
    assert plan.record.chunked_losses
    report = plan.verify(model, lambda: step(model))
    assert report.equal
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_other_batches_than_the_profiled_one(engine: str):
    plan = plan_for(Model(), engine)
    for rows in (1, 40, 200):
        chosen = Case(Model, lambda model, n=rows: model(X[:n], EXPECTED[:n]), ("blocks.*",))
        assert not differences(run(chosen, plan), run(chosen))
        assert CHUNKED in nodes(chosen.forward(plan.apply(chosen.model())))


def test_under_autocast(engine: str):
    def forward(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*SAMPLE)

    chosen = Case(Model, forward, ("blocks.*",))
    profile = chosen.profile()
    plan = autoac.solve(profile, 10**12, engine=engine, policies=[RECOMPUTE], regions=["blocks.*"])
    assert plan.record.chunked_losses
    assert not differences(run(chosen, plan), run(chosen))
    model = chosen.model()
    report = plan.verify(model, lambda: forward(model).backward())
    assert report.equal
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_a_graph_that_is_kept(engine: str):
    """As in the profiled step: the gradient is beside the logits, which live on."""

    def step(model: Any) -> None:
        model(*SAMPLE).backward(retain_graph=True)

    model = Model()
    profile = autoac.profile(model, lambda: step(model))
    plan = autoac.solve(profile, 10**12, engine=engine, policies=[RECOMPUTE], regions=["blocks.*"])
    assert [loss.alone for loss in chunkable_losses(profile)] == [False]
    report = plan.verify(model, lambda: step(model))
    assert report.equal
    assert report.measured_peak_bytes == report.predicted_peak_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's own look
def test_under_compiled_autograd():
    import torch._dynamo.compiled_autograd

    model = Model()
    expected = torch.autograd.grad(model(*SAMPLE), [model.classes.weight, model.blocks[0].up.weight])  # type: ignore[union-attr]
    plan_for(model, "replay").apply(model)
    for compiler in (lambda graph: graph, torch.compile(backend="eager")):
        model.zero_grad()
        loss = model(*SAMPLE)
        assert CHUNKED in nodes(loss)
        with torch._dynamo.compiled_autograd._enable(compiler):
            loss.backward()
        found = gradient(model.classes.weight), gradient(model.blocks[0].up.weight)  # type: ignore[union-attr]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_difference_is_named_where_it_is(monkeypatch: pytest.MonkeyPatch):
    """A chunked loss shows ops that see some rows only: those are not taken for what differs."""
    model = Model()
    plan = plan_for(
        model, "replay", 10**12, policies=[RECOMPUTE, autoac.Policy("MUST_RECOMPUTE", op="aten.gelu")]
    )
    original = ReplayCall._run_one

    def wrong(self: ReplayCall, record: Any, table: Any) -> Any:
        result = original(self, record, table)
        return result * 1.5 if "gelu" in str(record.func) else result

    monkeypatch.setattr(ReplayCall, "_run_one", wrong)
    report = plan.verify(model, SAMPLE)
    assert not report.equal
    assert report.first_difference == "backward op aten.mm.default in AddmmBackward0"


def test_memory_over_the_step():
    """The measured memory is put beside the predicted one, though one op of the plan is many of the step."""
    model = Model()
    plan = plan_for(model, "replay")
    measured = plan.measure_memory(model, SAMPLE)
    predicted = plan.memory_timeline()["live_bytes"]
    assert measured.max() == predicted.max()
    at_loss = plan.memory_timeline()["op"].str.contains("_log_softmax")
    assert torch.tensor((measured - predicted)[at_loss].to_numpy()).abs().max() <= 64


def test_fake_profile_has_the_same_losses():
    real, fake = (autoac.profile(Model(), SAMPLE, mode=mode) for mode in ("real", "fake"))
    assert chunkable_losses(real) == chunkable_losses(fake) != ()
