"""`--fsdp` and `--tp`: the step of one of many absent ranks, and the bytes of a rank for other numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoac.cli.output import in_one_unit, table
from autoac.cli.target import Target, is_recorded

if TYPE_CHECKING:
    import torch

    from autoac.parallel import FSDP2, TensorParallel
    from autoac.parallel.sizes import Held
    from autoac_solver.records.plan import PlanRecord
    from autoac_solver.records.profile import Profile

_Dtype = Literal["float32", "bfloat16", "float16"]

Ranks = Annotated[
    int | None,
    typer.Option(
        "--fsdp",
        metavar="RANKS",
        show_default=False,
        help="For one of so many ranks that shard the model with FSDP2 (fully_shard); none of them need be here.",
    ),
]
Split = Annotated[
    int | None,
    typer.Option(
        "--tp",
        metavar="RANKS",
        show_default=False,
        help="For one of so many ranks that split the layers of a transformers model, by its own plan; with --fsdp, "
        "each part is sharded further.",
    ),
]
Units = Annotated[
    list[str] | None,
    typer.Option(
        "--units",
        help="With --fsdp: modules to shard one by one, names or globs; may be repeated.  [default: the blocks]",
    ),
]
ReshardAfterForward = Annotated[
    bool | None,
    typer.Option(
        "--reshard-after-forward/--no-reshard-after-forward",
        show_default="resharded, but for the model's own",
        help="With --fsdp: whether gathered parameters are given up after forward, or kept until backward.",
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(show_default="1", help="With --fsdp: how many groups of ranks hold all the shards (HSDP)."),
]
Prefetch = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="one, in backward",
        help="With --fsdp: how many units are gathered ahead, in forward and in backward.",
    ),
]
ParamDtype = Annotated[
    _Dtype | None,
    typer.Option(show_default="the parameters'", help="With --fsdp: what parameters are gathered in."),
]
ReduceDtype = Annotated[
    _Dtype | None,
    typer.Option(show_default="the gradients'", help="With --fsdp: what gradients are reduced in."),
]
CpuOffload = Annotated[
    bool,
    typer.Option(
        "--cpu-offload",
        help="With --fsdp: parameters, gradients and optimizer are in the host's memory (CPUOffloadPolicy).",
    ),
]


@dataclass(frozen=True)
class Sharding:
    """The options of `--fsdp` and `--tp`, as `FSDP2` and `TensorParallel` take them; dtypes by name."""

    ranks: int | None
    split: int | None
    units: Sequence[str] | None
    reshard_after_forward: bool | None
    replicas: int
    prefetch: int | None
    param_dtype: str | None
    reduce_dtype: str | None
    cpu_offload: bool

    def spec(self, target: Target) -> FSDP2 | TensorParallel:
        """The spec for a model, which is not changed.

        Raises:
            typer.BadParameter: the units are no modules of it, or it has no plan of its own for tensor parallelism.
        """
        if self.split is None:
            return self._fsdp(target)
        from autoac.parallel import TensorParallel
        from autoac.parallel.tensor import own_plan
        from autoac_solver.records.errors import ProfilingError

        try:
            styles = own_plan(target.model)
        except ProfilingError as error:
            raise typer.BadParameter(str(error), param_hint="'--tp'") from error
        return TensorParallel(self.split, styles, None if self.ranks is None else self._fsdp(target))

    def _fsdp(self, target: Target) -> FSDP2:
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        from autoac.parallel import FSDP2
        from autoac.step.modules import select_modules
        from autoac_solver.records.errors import ProfilingError

        try:
            select_modules(target.model, self.units)
        except ProfilingError as error:
            raise typer.BadParameter(str(error).removeprefix("regions="), param_hint="'--units'") from error

        def dtype(name: str | None) -> torch.dtype | None:
            return None if name is None else getattr(torch, name)

        return FSDP2(
            self.ranks,
            self.units,
            self.reshard_after_forward,
            MixedPrecisionPolicy(param_dtype=dtype(self.param_dtype), reduce_dtype=dtype(self.reduce_dtype)),
            self.replicas,
            self.prefetch,
            CPUOffloadPolicy() if self.cpu_offload else None,
        )


def sharding(
    ranks: int | None,
    units: list[str] | None,
    reshard_after_forward: bool | None,
    replicas: int | None,
    prefetch: int | None,
    param_dtype: str | None,
    reduce_dtype: str | None,
    cpu_offload: bool,
    *,
    split: int | None = None,
    source: str | None,
    engine: str,
) -> Sharding | None:
    """The options of `--fsdp` and `--tp`, None if neither is given; loads nothing.

    Raises:
        typer.BadParameter: an option is invalid, by itself or with this source or engine.
    """
    others: Mapping[str, Any] = {
        "--units": units,
        "--[no-]reshard-after-forward": reshard_after_forward,
        "--replicas": replicas,
        "--prefetch": prefetch,
        "--param-dtype": param_dtype,
        "--reduce-dtype": reduce_dtype,
        "--cpu-offload": cpu_offload or None,
    }
    if ranks is None:
        for name, value in others.items():
            if value is not None:
                raise typer.BadParameter(
                    "it goes with --fsdp only: say of how many ranks with --fsdp RANKS.",
                    param_hint=f"'{name}'",
                )
        if split is None:
            return None
    elif ranks < 1:
        raise _wrong(f"{ranks} ranks shard nothing: say how many train the model together, 1 or more.")
    if source is not None and is_recorded(source):
        raise _wrong(
            f"{source} is a recorded step, whose number of ranks stays as it was recorded: pass a factory or --hf, or "
            f"record one with `autoac profile MODEL {_asked(ranks, split)}`."
        )
    if split is not None and split < 1:
        raise typer.BadParameter(
            f"{split} ranks split nothing: say how many compute a layer together, 1 or more.",
            param_hint="'--tp'",
        )
    from autoac_solver.build.engines import check_supported

    try:
        check_supported(engine, "parallel")
    except ValueError as error:
        raise _wrong(str(error)) from error
    replicas = 1 if replicas is None else replicas
    if replicas > 1 and split is not None:
        raise typer.BadParameter(
            "with --tp the shards are on all ranks of a part: leave it out.", param_hint="'--replicas'"
        )
    if replicas < 1 or (ranks or replicas) % replicas:
        raise typer.BadParameter(
            f"{ranks} ranks cannot be {replicas} groups of the same size: take a divisor of {ranks}.",
            param_hint="'--replicas'",
        )
    return Sharding(
        ranks,
        split,
        units,
        reshard_after_forward,
        replicas,
        prefetch,
        param_dtype,
        reduce_dtype,
        cpu_offload,
    )


def _asked(ranks: int | None, split: int | None) -> str:
    options = {"--fsdp": ranks, "--tp": split}
    return " ".join(f"{name} {value}" for name, value in options.items() if value is not None)


def _wrong(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="'--fsdp'")


# -- sizes ---------------------------------------------------------------------------------------------------------


def sizes(
    spec: FSDP2 | TensorParallel, target: Target, profile: Profile, record: PlanRecord | None = None
) -> list[Held]:
    """Bytes of a rank for half as many, as many and twice as many ranks; see `autoac.parallel.sizes.held`.

    Empty for ranks that only split layers: another number of them is another step.
    """
    from autoac.parallel.sizes import held, shards

    if not shards(spec):
        return []
    return held(spec, target.model, target.optimizer, profile, record)


def document(spec: FSDP2 | TensorParallel, found: Sequence[Held]) -> dict[str, Any]:
    """Plain data, for `--json`: under "fsdp" how parameters are sharded, under "tp" how layers are split."""
    from autoac.parallel import FSDP2

    if not isinstance(spec, FSDP2):
        said = {"tp": {"ranks": spec.world_size, "all_ranks": spec.ranks}}
        return said if spec.fsdp is None else {**said, **document(spec.fsdp, found)}
    return {
        "fsdp": {
            "ranks": spec.world_size,
            "replicas": spec.replicas,
            "prefetch": spec.prefetch,
            "reshard_after_forward": spec.reshard_after_forward,
            "cpu_offload": spec.offloads,
            "sizes": [one.as_json() for one in found],
        }
    }


def parts_table(ranks: int, parts: Mapping[str, int]) -> Any:
    """Table of the bytes alive at a rank's peak, by kind."""
    made = table(f"One of {ranks} ranks at its peak", *parts, "in all")
    total = sum(parts.values())
    size = in_one_unit(total)
    made.columns[0].justify = "right"
    made.add_row(*map(size, parts.values()), size(total))
    return made


def sizes_table(spec: FSDP2 | TensorParallel, found: Sequence[Held]) -> Any:
    """Table of the bytes that a rank holds permanently, for several numbers of ranks."""
    where = ", shards in the host's memory" if spec.offloads else ""
    with_peaks = any(one.peak_bytes is not None for one in found)
    made = table(
        f"Other numbers of ranks{', with the same plan' if with_peaks else ''}{where}",
        "ranks",
        "parameters",
        "gradients",
        "optimizer",
        *(["predicted peak"] if with_peaks else []),
    )
    made.columns[0].justify = "right"
    rows = [
        (one.parameters_bytes, one.gradients_bytes, one.optimizer_bytes, one.peak_bytes or 0) for one in found
    ]
    size = in_one_unit(*(amount for row in rows for amount in row))
    for one, row in zip(found, rows, strict=True):
        peak = [] if not with_peaks else ["-" if one.peak_bytes is None else size(one.peak_bytes)]
        made.add_row(str(one.ranks), *map(size, row[:3]), *peak)
    return made
