"""Engine compile, where transformers has put hooks on modules to record what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoac
from autoac.measure import measure_peak

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

LAYERS = 3


def make() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=256,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # others return no attention weights
    return model.train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def step(model: Any, **asked: bool) -> Any:
    model.zero_grad()
    output = model(**batch(), **asked)
    loss = output.loss
    for recorded in (output.hidden_states, output.attentions):
        if recorded is not None:
            loss = loss + recorded[1].square().sum()
    loss.backward()
    return output


def assert_as_uncompiled(model: Any, **asked: bool) -> None:
    plain = make()
    expected, found = step(plain, **asked), step(model, **asked)
    for name in ("hidden_states", "attentions"):
        theirs, ours = expected.get(name, ()), found.get(name, ())
        assert len(theirs) == len(ours) == (LAYERS + (name == "hidden_states") if name in str(asked) else 0)
        torch.testing.assert_close(ours, theirs)
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("when", ["before the plan", "under the plan"])
def test_blocks_stay_compiled_after_a_call_that_records_outputs(when: str) -> None:
    model = make()
    if when == "before the plan":
        model(**batch(), output_hidden_states=True)
        assert model.model.layers[0].self_attn._forward_hooks
    loose = autoac.plan(model, batch(), "1GB", engine="compile")
    plan = autoac.solve(loose.record.profile, int(0.9 * loose.predicted_peak_bytes), engine="compile")
    blocks = [f"model.layers.{i}" for i in range(LAYERS)]
    assert [region.name for region in plan.regions if region.point != "eager"][:LAYERS] == blocks
    plan.apply(model)
    step(model)
    peaks = []
    for _ in range(2):
        assert_as_uncompiled(model)
        model.zero_grad()
        peaks.append(measure_peak(lambda: step(model).loss.detach()).peak_above_start_bytes)
        if len(peaks) == 1:
            assert_as_uncompiled(model, output_hidden_states=True)
            assert model.model.layers[0].self_attn._forward_hooks
            with pytest.warns(
                UserWarning, match="runs uncompiled in calls that record what module 'self_attn' in"
            ):
                assert_as_uncompiled(model, output_attentions=True)
    assert peaks[0] == peaks[1]
    plan.remove(model)
