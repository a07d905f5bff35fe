"""Trainer under `AutoACCallback`: weights to the bit as without it, and the peak as predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from autoac.integrations.transformers import AutoACCallback  # noqa: E402
from autoac.plans import Plan  # noqa: E402
from autoac.policies import Policy  # noqa: E402
from autoac_solver.records.errors import InfeasibleBudgetError, PolicyError  # noqa: E402
from tests.integrations.compiled import assert_compiled  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

TOKENS, LENGTH = 64, 32
ENOUGH = 10**9

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "own checkpointing and evaluation": {
        "gradient_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
    },
}


def tiny(dropout: float = 0.1) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=TOKENS,
        attention_dropout=dropout,
        use_cache=False,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    found = [torch.randint(4, TOKENS, (LENGTH,)) for _ in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in found]


def trained(
    folder: Path,
    callback: AutoACCallback | None,
    steps: int = 4,
    resume: bool = False,
    dropout: float = 0.1,
    model: torch.nn.Module | None = None,
    **settings: Any,
) -> Any:
    """The trainer after a few steps from always the same start."""
    transformers.set_seed(0)
    model, data = tiny(dropout) if model is None else model, texts(32)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        report_to=[],
        logging_steps=2,
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **settings},
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[callback] if callback else [],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def assert_same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    weights = b.state_dict()
    for name, value in a.state_dict().items():
        assert torch.equal(value, weights[name]), name


def logged(trainer: Any) -> list[dict[str, float]]:
    """What the trainer tells its loggers by itself, but for times."""
    kinds = "step", "loss", "grad_norm", "learning_rate", "eval_loss"
    own = [logs for logs in trainer.state.log_history if "autoac/measured_peak_bytes" not in logs]
    return [{kind: logs[kind] for kind in kinds if kind in logs} for logs in own]


def tight(plan: Plan | None) -> int:
    assert plan is not None
    return int(plan.resident_bytes + 0.85 * (plan.record.unplanned_peak_bytes - plan.resident_bytes))


@pytest.mark.parametrize("setting", SETTINGS)
def test_trains_as_without_within_the_budget(setting: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    without = trained(tmp_path, None, **SETTINGS[setting])
    ample = AutoACCallback(ENOUGH)
    assert ample.plan is None
    trained(tmp_path, ample, **SETTINGS[setting])
    budget = tight(ample.plan)
    callback = AutoACCallback(budget)
    with caplog.at_level("INFO", "autoac"):
        trainer = trained(tmp_path, callback, **SETTINGS[setting])
    assert_same_weights(without.model, trainer.model)
    assert callback.plan is not None
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes <= budget
    assert callback.measured_peak_bytes == pytest.approx(callback.plan.predicted_peak_bytes, rel=1e-3)
    assert not callback.plan.is_not_followed
    assert any(region.wrapped for region in callback.plan.regions)
    told = [logs for logs in trainer.state.log_history if "autoac/measured_peak_bytes" in logs]
    assert logged(trainer) == logged(without)
    assert [logs["autoac/measured_peak_bytes"] for logs in told] == [callback.measured_peak_bytes]
    says = "checkpointing of LlamaForCausalLM is off" in caplog.text
    assert says == ("gradient_checkpointing" in SETTINGS[setting])
    assert "autoac" not in str(trainer.model.__dict__.keys())


def test_after_an_impossible_budget_the_models_own_checkpointing_is_on_again(tmp_path: Path):
    """Whoever falls back to it trains within its memory."""
    model = tiny(0.1)
    model.gradient_checkpointing_enable()
    with pytest.raises(InfeasibleBudgetError):
        trained(tmp_path, AutoACCallback(1000), model=model)
    assert model.is_gradient_checkpointing


def test_compiled_by_the_trainer(tmp_path: Path):
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    without = trained(tmp_path, None, **compiled)
    ample = AutoACCallback(ENOUGH)
    trained(tmp_path, ample, steps=2, **compiled)
    callback = AutoACCallback(tight(ample.plan))
    trainer = trained(tmp_path, callback, **compiled)
    assert_same_weights(without.model, trainer.model)
    assert callback.plan is not None
    assert callback.plan.engine == "sac"
    assert any(region.wrapped for region in callback.plan.regions)
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes <= callback.plan.predicted_peak_bytes
    torch._dynamo.reset()


def test_resumes_and_starts_again(tmp_path: Path):
    resumed = {}
    callback = AutoACCallback(ENOUGH)
    for name in ("plain", "planned"):
        folder = tmp_path / name
        trained(folder, None, steps=4, save_strategy="steps", save_steps=2)
        using = callback if name == "planned" else None
        resumed[name] = trained(folder, using, steps=6, resume=True, save_strategy="no")
    assert_same_weights(resumed["plain"].model, resumed["planned"].model)
    assert callback.plan is not None


@pytest.mark.parametrize("step", [0, 2], ids=["recorded", "planned"])
def test_a_run_that_was_interrupted_leaves_nothing_in_the_way(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Trainer does not tell its callbacks: the next run takes off what is left, or the callback's `remove` does."""
    made: list[torch.nn.Module] = []
    run = transformers.Trainer.training_step

    def interrupted(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        made.append(model)
        if self.state.global_step == step:
            loss = run(self, model, inputs, *args)
            if len(made) == step + 1:
                raise KeyboardInterrupt
            return loss
        return run(self, model, inputs, *args)

    callback = AutoACCallback(ENOUGH)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, "training_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path, callback)
    model = made[0]
    again = AutoACCallback(ENOUGH)
    trainer = trained(tmp_path, again, model=model)
    assert again.plan is not None
    assert trainer.state.global_step == 4
    callback.remove()
    assert "autoac" not in str(model.__dict__.keys())


def test_its_own_checkpointing_is_as_it_was_after_training(tmp_path: Path):
    model = tiny()
    model.gradient_checkpointing_enable()
    trained(tmp_path, AutoACCallback(ENOUGH), model=model)
    assert model.is_gradient_checkpointing


def test_smaller_batch_is_found_and_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Trainer halves the batch when a step runs out of memory, and begins anew with the model as it is."""
    callback = AutoACCallback(ENOUGH)
    step = transformers.Trainer.training_step

    def failing(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        if len(inputs["input_ids"]) > 2 and self.state.global_step == 2:
            raise RuntimeError("CUDA out of memory.")
        return step(self, model, inputs, *args)

    monkeypatch.setattr(transformers.Trainer, "training_step", failing)
    trainer = trained(tmp_path, callback, auto_find_batch_size=True)
    assert trainer.state.global_step == 4
    assert callback.plan is not None
    assert f"input_ids int64[2,{LENGTH}]" in callback.plan.record.profile.sample


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"on_larger_batches": "warn"}, "on_larger_batches"),
        ({"on_larger": "stop"}, "on_larger is 'stop'"),
        ({"path": "plan.txt"}, "plan.txt"),
        ({"budget": "20"}, "'20' is not an amount"),
        ({"headroom": "1G"}, "'1G' is not an amount"),
        ({"budget": "1GB", "headroom": "2GB"}, "headroom='2GB' leaves nothing of budget='1GB'"),
        ({"budget": "50%", "headroom": "60%"}, "headroom='60%' leaves nothing"),
        ({"engine": "compile", "policies": [Policy("MUST_SAVE", op="aten.mm")]}, "follows no policies"),
        ({"policies": 3}, "policies= is a int"),
        ({"engine": "compile", "budget_of": "reserved"}, "compile"),
    ],
)
def test_what_makes_no_sense_is_refused_before_there_is_a_trainer(options: dict[str, Any], error: str):
    with pytest.raises((TypeError, ValueError, PolicyError), match=error):
        AutoACCallback(**{"budget": ENOUGH, **options})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_with_compiled_blocks(tmp_path: Path) -> None:
    """Without dropout, of which compiled code draws other masks."""
    options: dict[str, Any] = {"steps": 6, "dropout": 0.0, **SETTINGS["accumulation"]}
    without = trained(tmp_path, None, **options)
    callback = AutoACCallback(ENOUGH, engine="compile")
    planned = trained(tmp_path, callback, **options)
    assert_compiled(callback)
    for found, expected in zip(planned.model.parameters(), without.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
