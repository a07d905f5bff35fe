"""TRL's trainers under `AutoACCallback`, with their defaults: weights to the bit as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

import datasets  # noqa: E402 - TRL needs it
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from autoac.integrations.transformers import AutoACCallback  # noqa: E402
from autoac_solver.plan.planning import least_budget_bytes  # noqa: E402
from tests.integrations.test_transformers import ENOUGH, assert_same_weights  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

WORDS, LENGTH = 64, 128


def tokenizer() -> Any:
    """One token for each of a few words."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, WORDS)}}
    found = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama() -> Any:
    """Large enough that not all of the peak is TRL's loss."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=WORDS,
        attention_dropout=0.1,
        use_cache=False,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def sentences(count: int) -> Any:
    numbers = torch.randint(3, WORDS, (count, LENGTH - 1)).tolist()
    return datasets.Dataset.from_dict({"text": [" ".join(f"w{n}" for n in row) for row in numbers]})


def pairs(count: int) -> Any:
    def words(length: int) -> list[str]:
        numbers = torch.randint(3, WORDS, (count, length)).tolist()
        return [" ".join(f"w{n}" for n in row) for row in numbers]

    return datasets.Dataset.from_dict(
        {"prompt": words(LENGTH // 4), "chosen": words(LENGTH // 2), "rejected": words(LENGTH // 2)}
    )


def trained(
    folder: Path, callback: AutoACCallback | None, steps: int = 4, lora: bool = False, dpo: bool = False
) -> Any:
    """The trainer, `SFTTrainer` or `DPOTrainer`, after a few steps from always the same start."""
    transformers.set_seed(0)
    model, data = llama(), pairs(32) if dpo else sentences(32)
    datasets.disable_progress_bars()
    arguments = (trl.DPOConfig if dpo else trl.SFTConfig)(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_steps=steps,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    trainer = (trl.DPOTrainer if dpo else trl.SFTTrainer)(
        model=model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear") if lora else None,
        callbacks=[callback] if callback else [],
        **({"ref_model": llama()} if dpo else {}),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", [{}, {"lora": True}, {"dpo": True}], ids=["SFT", "LoRA", "DPO"])
def test_trains_as_without_within_the_budget(
    kind: dict[str, bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    without = trained(tmp_path, None, **kind)
    ample = AutoACCallback(ENOUGH)
    trained(tmp_path, ample, **kind, steps=2)
    assert ample.plan is not None
    full, least = ample.plan.record.unplanned_peak_bytes, least_budget_bytes(ample.plan.record.profile)
    budget = int(least + 0.3 * (full - least))
    callback = AutoACCallback(budget)
    with caplog.at_level("INFO", "autoac"):
        trainer = trained(tmp_path, callback, **kind)
    assert_same_weights(without.model, trainer.model)
    assert callback.plan is not None
    assert any(region.wrapped for region in callback.plan.regions)
    assert not callback.plan.is_not_followed
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes <= budget
    assert callback.measured_peak_bytes == pytest.approx(callback.plan.predicted_peak_bytes, rel=1e-3)
    assert "checkpointing of" in caplog.text  # which TRL turns on
