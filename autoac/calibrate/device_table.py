"""Record a device's cost table: its rates, the engines' own costs, and every op of a few models as it runs there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from autoac.calibrate.models import LLAMA, RESNET, Sample, llama, resnet
from autoac.device import device_for
from autoac.price.engine_costs import MOST_BETWEEN_BYTES, device_rates, engine_costs
from autoac.progress import Tell
from autoac.record.recorder import record
from autoac.step.model import device_bytes
from autoac.step.step import TrainingStep
from autoac_solver.records.devices import DeviceTable, Entry
from autoac_solver.records.profile import Profile


def calibrate(name: str, device: torch.device, size: str, progress: Tell | None = None) -> DeviceTable:
    """Measure the table of a device of this machine.

    Args:
        name: the table's name.
        device: CPU or CUDA.
        size: of the models whose ops are timed, see `models`. Each is timed at three batch sizes, so that ops of
            other sizes can be interpolated.
        progress: called with the current work and the share done.
    """
    tell = progress or (lambda *_: None)
    tell("rates", 0.0)
    rates = device_rates(device)
    entries: dict[str, Entry] = {}
    models = list(_models(size, device))
    for index, (title, model, sample) in enumerate(models):
        tell(title, 0.1 + 0.9 * index / len(models))
        for entry in entries_of(record(TrainingStep(model, sample))):
            entries.setdefault(entry.signature, entry)
    return replace(
        rates,
        name=name,
        title=_title(device),
        memory_bytes=device_bytes(device),
        costs=engine_costs(device, MOST_BETWEEN_BYTES),  # a model that needs a plan has large ops
        made={
            "on": _title(device),
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "models": f"Llama-shaped and ResNet-shaped, size {size}",
        },
        entries=tuple(entries.values()),
    )


def entries_of(profile: Profile) -> Iterator[Entry]:
    """The measured ops of a profile, one for each signature."""
    seen: set[int] = set()
    for op in profile.tape:
        if op.signature in seen or op.signature < 0 or op.time_from != "measured" or not op.time_s:
            continue
        seen.add(op.signature)
        text = profile.signatures[op.signature]
        yield Entry(text, op.name, op.dtype, op.flops, op.moved_bytes, op.time_s, op.spread_s)


def _models(size: str, device: torch.device) -> Iterator[tuple[str, torch.nn.Module, Sample]]:
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for factor in (1, 2, 4):
            shape = LLAMA[size]
            few = replace(shape, layers=2, batch=max(1, shape.batch * factor // 2))
            yield f"Llama, {kind}, batch {few.batch}", *llama(few, dtype, device)
        if dtype is torch.bfloat16 and device_for(device).on_hosts_processors:
            continue  # nobody trains convolutions in bf16 on CPU, and they are very slow there
        for factor in (1, 2, 4):
            pictures = RESNET[size]
            few_pictures = replace(pictures, batch=max(1, pictures.batch * factor // 2))
            yield f"ResNet, {kind}, batch {few_pictures.batch}", *resnet(few_pictures, dtype, device)


def _title(device: torch.device) -> str:
    return device_for(device).name() or f"CPU, {torch.get_num_threads()} threads"
