"""The casts to float32 in transformers' losses: left to the loss, which keeps half-precision logits; torch's bits."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.loss import loss_utils

import autoac
from autoac.execute.cross_entropy import delayed
from autoac.measure import measure_peak
from autoac_solver.build.losses.cross_entropy import chunkable_losses
from tests.execute.exact.harness import Case, differences, least_budget, run

CLASSES, ROWS = 4096, (4, 64)
LOGITS_BYTES = CLASSES * ROWS[0] * ROWS[1] * 2
TOKENS = torch.arange(ROWS[0] * ROWS[1]).view(ROWS) * 7 % CLASSES
SIZES: dict[str, Any] = {
    "vocab_size": CLASSES,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False))


def bert() -> nn.Module:
    options: dict[str, Any] = {**SIZES, "pad_token_id": 0, "attn_implementation": "sdpa"}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**options))


def in_half(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().to(torch.bfloat16)


def case(build: Callable[[], nn.Module], autocast: bool, **inputs: Any) -> Case:
    def forward(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=TOKENS, labels=TOKENS, **inputs).loss

    return Case(build if autocast else in_half(build), forward, ("*.layer*.*",))


def check(chosen: Case, engine: str) -> tuple[autoac.Plan, bool]:
    """The plan for the least budget, after its peak and bits are checked, and whether its loss makes its own cast."""
    profile = chosen.profile()
    plan = autoac.solve(profile, least_budget(profile, engine, chosen.regions), engine=engine)
    assert plan.record.chunked_losses
    model = chosen.model()
    report = plan.verify(model, lambda: chosen.backward(chosen.forward(model)))
    assert report.equal
    assert report.measured_peak_bytes == report.predicted_peak_bytes
    assert not differences(run(chosen, plan), run(chosen))
    (loss,) = chunkable_losses(profile)
    return plan, bool(loss.casts)


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("build", [llama, bert])
def test_only_half_precision_logits_are_kept(
    build: Callable[[], nn.Module], autocast: bool, engine: str, monkeypatch: pytest.MonkeyPatch
):
    chosen = case(build, autocast)
    plan, casts = check(chosen, engine)
    assert casts
    monkeypatch.setattr("autoac.execute.cross_entropy.lean.may_delay", lambda frame: False)
    whole, casts = check(chosen, engine)
    assert not casts
    # The float32 copy in forward, beside the half-precision logits, is as large as two of these.
    assert whole.predicted_peak_bytes - plan.predicted_peak_bytes > 1.5 * LOGITS_BYTES


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_items_in_batch": torch.tensor(200)},
        {"num_items_in_batch": 200},
        {"shift_labels": TOKENS.roll(-1)},
        {"logits_to_keep": 16, "shift_labels": TOKENS[:, :16].contiguous()},
    ],
    ids=lambda inputs: " ".join(inputs),
)
def test_arguments_that_trainers_give(inputs: dict[str, Any]):
    _, casts = check(case(llama, True, **inputs), "replay")
    assert casts


def test_no_copy_without_a_plan_that_chunks():
    """The lean loss makes the cast itself, and frees it with the log-softmax."""
    chosen = case(llama, True)
    plan = autoac.solve(chosen.profile(), 10**12)
    assert not plan.record.chunked_losses
    model = chosen.model()
    report = plan.verify(model, lambda: chosen.backward(chosen.forward(model)))
    assert report.equal
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_other_code_casts_as_ever(monkeypatch: pytest.MonkeyPatch):
    """Another version of the library, and a loss of the user's own, may use the float32 logits for more."""
    original = loss_utils.ForCausalLMLoss

    def changed(logits: Any, labels: Any, vocab_size: int, **_: Any) -> torch.Tensor:
        logits = logits.float()
        loss = nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))
        return loss + logits.logsumexp(-1).square().mean()

    namespace: Any = vars(loss_utils)
    in_library = FunctionType(changed.__code__, namespace, original.__name__)
    for function in (changed, in_library):
        with monkeypatch.context() as patch:
            if function is in_library:
                patch.setattr(loss_utils, "ForCausalLMLoss", function)

            def build(function: Any = function) -> nn.Module:
                model: Any = llama()
                model.loss_function = function
                return model

            chosen = case(build, True)
            profile = chosen.profile()
            assert not any(loss.casts for loss in chunkable_losses(profile))
            plan = autoac.solve(profile, least_budget(profile, "replay", chosen.regions))
            assert not differences(run(chosen, plan), run(chosen))


def test_another_cross_entropy_in_place_of_torchs(monkeypatch: pytest.MonkeyPatch):
    """It is given the float32 logits, as by the library without a plan, also when it came after the plan."""
    original = nn.functional.cross_entropy
    given: list[torch.dtype] = []

    def other(logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        given.append(logits.dtype)
        return original(logits, *args, **options) + logits.logsumexp(-1).square().mean()

    chosen = case(llama, True)
    early = autoac.solve(chosen.profile(), 10**12)
    monkeypatch.setattr(nn.functional, "cross_entropy", other)
    late = autoac.solve(chosen.profile(), 10**12)
    for plan in (early, late):
        assert not differences(run(chosen, plan), run(chosen))
    assert set(given) == {torch.float32}


def test_logits_of_several_losses_are_freed_one_by_one():
    class Heads(nn.Module):
        """Multi-token prediction."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Embedding(CLASSES, 32)
            self.heads = nn.ModuleList(nn.Linear(32, CLASSES, bias=False) for _ in range(6))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x, loss = self.body(tokens), torch.zeros(())
            for shift, head in enumerate(self.heads):
                loss = loss + loss_utils.ForCausalLMLoss(head(x), tokens.roll(-shift, 1), CLASSES)
            return loss

    def forward(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(TOKENS)

    chosen = Case(Heads, forward, ("heads.*",))
    plan = autoac.solve(chosen.profile(), 10**12)
    assert not plan.record.chunked_losses
    report = plan.verify(model := chosen.model(), lambda: chosen.backward(forward(model)))
    assert report.equal
    assert report.measured_peak_bytes == report.predicted_peak_bytes
    assert report.measured_peak_bytes < report.unplanned_peak_bytes


def test_logits_that_are_used_after_the_loss():
    """They are still those of half precision, and whole."""

    def build() -> nn.Module:
        model = llama()
        forward = model.forward

        def with_accuracy(**inputs: Any) -> Any:
            output = forward(**inputs)
            model.right = (output.logits.float().argmax(-1) == TOKENS).sum()
            return output

        model.forward = with_accuracy
        return model

    chosen = case(build, True)
    profile = chosen.profile()
    plan = autoac.solve(profile, least_budget(profile, "replay", chosen.regions))
    model, reference = chosen.model(), chosen.model()
    plan.apply(model)
    for trained in (model, reference):
        with torch.autocast("cpu", torch.bfloat16):
            output = trained(input_ids=TOKENS, labels=TOKENS)
        assert output.logits.dtype == torch.bfloat16
        kept = output.logits.detach().clone()
        output.loss.backward()
        assert torch.equal(output.logits, kept)
    assert torch.equal(model.right, reference.right)


def test_a_step_without_gradients():
    chosen = case(llama, True)
    profile = chosen.profile()
    model = autoac.solve(profile, least_budget(profile, "replay", chosen.regions)).apply(chosen.model())
    reference = chosen.model()
    with torch.no_grad():
        assert torch.equal(chosen.forward(model), chosen.forward(reference))
    peaks = []
    for evaluated in (model, reference):
        with torch.no_grad():
            peaks.append(measure_peak(lambda evaluated=evaluated: chosen.forward(evaluated)))
    assert peaks[0].peak_above_start_bytes == peaks[1].peak_above_start_bytes


def test_these_functions_are_known():
    """If this fails, transformers has changed them: see whether the casts may still be left to the loss."""
    for name, used in delayed._USED.items():
        assert getattr(loss_utils, name).__code__.co_names == tuple(used.split()), name
