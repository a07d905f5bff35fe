"""One rank: trainers with the callbacks under DDP and FSDP2. A case that raises tells its error."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun sets them
os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
os.environ["TORCHELASTIC_RUN_ID"] = "autoac"
os.environ["GROUP_RANK"] = "0"
os.environ["ACCELERATE_USE_CPU"] = "true"

import accelerate
import lightning
import torch
import transformers
from cases import run_cases
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import autoac
from autoac.calibrate.compiled import table
from autoac.integrations.lightning import AutoACCallback as ForLightning
from autoac.integrations.transformers import AutoACCallback as ForTransformers
from autoac.plans import Plan
from autoac.torch_private import is_unit
from autoac_solver.records.engines import EngineName
from tests.integrations.test_transformers import texts, tiny

CASES: dict[str, Callable[[int | None], Any]] = {}
STEPS = 5
BUDGETS = {  # about 0.85 of the peak without a plan
    "trainer_ddp": 1_900_000,
    "trainer_fsdp2": 1_610_000,
    "accelerate_fsdp2": 1_610_000,
    "lightning_ddp": 2_030_000,
    "lightning_fsdp2": 1_610_000,
    "trainer_fsdp2_compiled": 1_400_000,
}


def case(function: Callable[[int | None], Any]) -> Callable[[int | None], Any]:
    CASES[function.__name__] = function
    return function


def data() -> Any:
    return texts(64)


def weights_of(model: Any) -> list[torch.Tensor]:
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()
    ]


def told(model: Any, plan: Plan | None, measured: int | None) -> Any:
    return weights_of(model), plan, measured


def trainer(budget: int | None, engine: EngineName = "auto", **settings: Any) -> Any:
    transformers.set_seed(0)
    callback = None if budget is None else ForTransformers(budget, engine=engine)
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(sys.argv[1]).parent / "out"),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        **settings,
    )
    made: Any = transformers.Trainer(
        model=tiny(), args=arguments, train_dataset=data(), callbacks=[callback] if callback else []
    )
    if "fsdp" in settings:
        shards_on_cpu(made.accelerator, plugin())
        made.is_fsdp_enabled = True
    made.train()
    assert ("fsdp" in settings) == is_unit(made.model)
    return told(made.model, callback and callback.plan, callback and callback.measured_peak_bytes)


def plugin() -> Any:
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )


def shards_on_cpu(accelerator: Any, fsdp: Any) -> None:
    """Let `prepare` call `fully_shard`: on CPU, accelerate by itself puts DDP around the model whatever it is given."""
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = fsdp


@case
def trainer_ddp(budget: int | None) -> Any:
    return trainer(budget)


@case
def trainer_fsdp2(budget: int | None) -> Any:
    config = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return trainer(budget, fsdp=True, fsdp_config=config)


@case
def trainer_fsdp2_compiled(budget: int | None) -> Any:
    table.MOST_COMPILED = 3
    config = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return trainer(budget, "compile", fsdp=True, fsdp_config=config)


@case
def accelerate_fsdp2(budget: int | None) -> Any:
    transformers.set_seed(0)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    shards_on_cpu(accelerator, plugin())
    model = tiny().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert is_unit(model)
    handle = None if budget is None else autoac.auto(model, budget, measure=True)
    for index, batch in enumerate(loader):
        if index == STEPS:
            break
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    found = told(model, handle and handle.plan, handle and handle.measured_peak_bytes)
    if handle is not None:
        handle.remove()
    return found


class Task(lightning.LightningModule):
    """A Llama that `configure_model` shards where the strategy brings a mesh."""

    def __init__(self, shards: bool) -> None:
        super().__init__()
        self.net, self.shards = tiny(), shards

    def configure_model(self) -> None:
        if self.shards:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for layer in self.net.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def with_lightning(budget: int | None, strategy: Any, shards: bool) -> Any:
    lightning.seed_everything(0, verbose=False)
    task = Task(shards)
    callback = None if budget is None else ForLightning(budget)
    lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if callback else [],
    ).fit(task, torch.utils.data.DataLoader(data(), batch_size=4))
    return told(task, callback and callback.plan, callback and callback.measured_peak_bytes)


@case
def lightning_ddp(budget: int | None) -> Any:
    return with_lightning(budget, DDPStrategy(process_group_backend="gloo"), shards=False)


@case
def lightning_fsdp2(budget: int | None) -> Any:
    # Else Lightning makes the ranks of a machine a tensor-parallel group, each with a model of its own.
    strategy = ModelParallelStrategy(
        data_parallel_size=int(os.environ["WORLD_SIZE"]),
        tensor_parallel_size=1,
        process_group_backend="gloo",
    )
    return with_lightning(budget, strategy, shards=True)


def compared(name: str) -> dict[str, Any]:
    plain = CASES[name](None)[0]
    weights, plan, measured = CASES[name](BUDGETS[name])
    return {
        "equal": len(plain) == len(weights) and all(map(torch.equal, plain, weights)),
        "apart": max(float((a - b).abs().max()) for a, b in zip(plain, weights, strict=True)),
        "engine": plan.engine,
        "id": plan.program_id,
        "predicted": plan.predicted_peak_bytes,
        "measured": measured,
        "budget": BUDGETS[name],
        "recomputing": sum(region.wrapped for region in plan.regions),
    }


def main() -> None:
    run_cases({name: functools.partial(compared, name) for name in CASES})


if __name__ == "__main__":
    main()
