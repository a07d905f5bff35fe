"""Lightning's Trainer under `AutoACCallback`: weights to the bit as without it, and the peak as predicted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

lightning = pytest.importorskip("lightning")

from autoac.integrations.lightning import AutoACCallback  # noqa: E402
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


def trained(setting: str, callback: AutoACCallback | None, steps: int = 5) -> Task:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    task = Task(setting == "manual")
    data = torch.utils.data.TensorDataset(
        torch.randn(10 * BATCH, WIDTH), torch.randint(0, WIDTH, (10 * BATCH,))
    )
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[callback] if callback else [],
        logger=False,
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
    task = trained(setting, callback)
    for name, value in task.state_dict().items():
        assert torch.equal(value, without.state_dict()[name]), name
    plan = callback.plan
    assert plan is not None
    assert any(region.wrapped for region in plan.regions)
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert callback.measured_peak_bytes <= plan.budget_bytes
    assert "forward" not in task.__dict__
