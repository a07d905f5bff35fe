"""Lightning's Trainer under `AutoACCallback`: weights to the bit as without it, and the peak as predicted."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

lightning = pytest.importorskip("lightning")

from autoac.integrations.lightning import AutoACCallback  # noqa: E402
from tests.integrations.compiled import assert_compiled  # noqa: E402
from tests.small_models import BATCH, WIDTH, make  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

ENOUGH = 10**9
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16-mixed"},
    "accumulation": {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
    "manual": {},
    "two optimizers": {},
}


class Task(lightning.LightningModule):
    """Its `training_step` calls a module of it, not itself."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.net = make(blocks=6)
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Adversarial(lightning.LightningModule):
    """Its own forward is the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = make(blocks=2), make(blocks=3)
        self.automatic_optimization = False

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, index: int) -> None:
        x, _ = batch
        for optimizer, trains_critic in zip(self.optimizers(), (True, False), strict=True):
            self.toggle_optimizer(optimizer)
            made = self(torch.randn_like(x))
            if trains_critic:
                loss = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(made.detach())).mean()
            else:
                loss = F.softplus(-self.critic(made)).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.critic.parameters()), torch.optim.Adam(self.generator.parameters())]


class Told(lightning.pytorch.loggers.logger.Logger):
    """A logger that keeps what it is told of the plan."""

    name, version = "told", 0

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[dict[str, float]] = []

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("autoac/") for name in metrics):
            self.plans.append(metrics)


def trained(
    setting: str,
    callback: AutoACCallback | None,
    steps: int = 5,
    logger: Told | None = None,
    task: Any = None,
) -> torch.nn.Module:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    several = setting == "two optimizers"
    task = task or (Adversarial() if several else Task(setting == "manual"))
    data = torch.utils.data.TensorDataset(
        torch.randn(10 * BATCH, WIDTH), torch.randint(0, WIDTH, (10 * BATCH,))
    )
    trainer = lightning.Trainer(
        max_steps=2 * steps if several else steps,  # it counts those of optimizers
        accelerator="cpu",
        callbacks=[callback] if callback else [],
        logger=logger or False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **SETTINGS[setting],
    )
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=BATCH))
    return task


@pytest.mark.parametrize("setting", SETTINGS)
def test_trains_as_without_within_the_budget(setting: str):
    without = trained(setting, None)
    ample = AutoACCallback(ENOUGH)
    assert ample.plan is None
    trained(setting, ample)
    assert ample.plan is not None
    full, least = ample.plan.record.unplanned_peak_bytes, ample.plan.resident_bytes
    callback = AutoACCallback(int(least + 0.85 * (full - least)))
    logger = Told()
    task = trained(setting, callback, logger=logger)
    for name, value in task.state_dict().items():
        assert torch.equal(value, without.state_dict()[name]), name
    plan = callback.plan
    assert plan is not None
    assert any(region.wrapped for region in plan.regions)
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert callback.measured_peak_bytes <= plan.budget_bytes
    told = {
        "autoac/budget_bytes": plan.budget_bytes,
        "autoac/predicted_peak_bytes": plan.predicted_peak_bytes,
        "autoac/measured_peak_bytes": callback.measured_peak_bytes,
    }
    assert logger.plans == [told]
    assert "forward" not in task.__dict__


def test_a_run_that_is_not_measured_tells_its_prediction():
    callback, logger = AutoACCallback(ENOUGH, measure=False), Told()
    trained("fp32", callback, logger=logger)
    assert callback.plan is not None
    assert callback.measured_peak_bytes is None
    assert [sorted(told) for told in logger.plans] == [["autoac/budget_bytes", "autoac/predicted_peak_bytes"]]


def test_a_run_that_resumes_measures_a_step_that_begins_as_the_recorded_one(tmp_path: Path):
    """Lightning clears gradients within the step, after forward. The first step of a run has none to begin with."""
    callback = AutoACCallback(ENOUGH)
    trained("fp32", callback)
    assert callback.plan is not None
    full, least = callback.plan.record.unplanned_peak_bytes, callback.plan.resident_bytes
    budget = int(least + 0.85 * (full - least))
    for _ in range(2):  # the second takes the plan up
        callback = AutoACCallback(budget, path=tmp_path / "plan.json")
        trained("fp32", callback)
        plan = callback.plan
        assert plan is not None
        table = plan.record.profile.storage_table
        cleared = sum(storage.bytes for storage in table if storage.kind == "Gradient" and storage.alloc == 0)
        assert cleared == sum(storage.bytes for storage in table if storage.kind == "Parameter")
        assert callback.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)


class Called(Task):
    """Its `training_step` calls the module itself, on a part of its batch."""

    def __init__(self) -> None:
        super().__init__(manual=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return {"loss": loss}


@pytest.mark.parametrize("setting", ["fp32", "bf16"])
def test_a_module_that_calls_itself_is_planned_without_a_false_alarm(setting: str):
    callback = AutoACCallback(ENOUGH, verify=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task = trained(setting, callback, task=Called())
    assert not [str(w.message) for w in caught if "autoac" in str(w.filename) or "plan" in str(w.message)]
    assert callback.plan is not None
    assert callback.measured_peak_bytes == callback.plan.predicted_peak_bytes
    assert "log" not in task.__dict__


def test_a_step_of_ones_own_optimizers_is_not_verified():
    with pytest.raises(ValueError, match="automatic_optimization is False"):
        trained("manual", AutoACCallback(ENOUGH, verify=True))


class Seldom(Adversarial):
    """The generator is trained on every third batch."""

    def training_step(self, batch: Any, index: int) -> None:
        x, _ = batch
        for optimizer, trains_critic in zip(self.optimizers(), (True, False), strict=True):
            if not trains_critic and index % 3 < 2:
                continue
            self.toggle_optimizer(optimizer)
            loss = F.softplus(self.critic(x)).mean() if trains_critic else self(x).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def test_the_batch_in_which_all_optimizers_step_is_planned_for():
    callback = AutoACCallback(ENOUGH)
    trained("two optimizers", callback, steps=9, task=Seldom())
    assert callback.plan is not None
    called = {call.fqn.partition(".")[0] for call in callback.plan.record.profile.calls}
    assert {"critic", "generator"} <= called


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_with_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is not called by its trainer: only what its blocks are given is copied.

    Without dropout, of which compiled code draws other masks.
    """
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    without = trained("accumulation", None, steps=7)
    callback = AutoACCallback(ENOUGH, engine="compile")
    planned = trained("accumulation", callback, steps=7)
    assert_compiled(callback)
    for found, expected in zip(planned.parameters(), without.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
