"""Random models: modules whose forward is a random graph of what people write in theirs.

All values are square matrices, so that any op takes any of them. A `Stage` is a module with a random forward of its
own: functions, layers with parameters and buffers, writes in place, blocks inside it, and calls of the same layer
again. A model calls some stages one after another, some of them several times.

A model is described by frozen records of numbers and names (`ModelSpec`), which hypothesis draws, prints and shrinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.opaque import OPAQUE, OPAQUE_LAYERS

SIZE = 32


# -- functions ---------------------------------------------------------------------------------------------------------


class Swish(torch.autograd.Function):
    """Saves its input, and something on the context besides."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.gate = torch.sigmoid(x)
        ctx.save_for_backward(x)
        return x * ctx.gate

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * (ctx.gate + x * ctx.gate * (1 - ctx.gate))


class Quantized(torch.autograd.Function):
    """Saves its output and integers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        levels = (x * 8).round().to(torch.int8)
        result = torch.tanh(levels.float() / 8)
        ctx.save_for_backward(levels, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        levels, result = ctx.saved_tensors
        return gradients[0] * (1 - result * result) * (levels != 0)


class Negated(torch.autograd.Function):
    """Writes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


def _gates(t: torch.Tensor) -> torch.Tensor:
    """As in a recurrent cell: parts of one storage that autograd takes for separate, each written in place."""
    left, right = (t * 0.5).unsafe_chunk(2, 1)
    left.sigmoid_()
    right.mul_(left).tanh_()
    return torch.cat([right * left, left], 1)


def _experts(t: torch.Tensor) -> torch.Tensor:
    """Rows sorted by where they are sent, worked on in groups whose sizes depend on the data, and put back."""
    order = t[:, 0].argsort()
    parts = t.index_select(0, order).split([SIZE // 4, SIZE - SIZE // 4])
    return torch.zeros_like(t).index_add(0, order, torch.cat([parts[0].tanh(), parts[1].sin()]))


def _half(t: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (t @ t.t()).float() / SIZE


def _no_grad_statistics(t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = t.abs().amax().clamp(min=1.0)
    return t / scale


def _branch(t: torch.Tensor) -> torch.Tensor:
    return t.sin() if t.detach().sum().item() > 0 else t * 0.5


def _hooked(t: torch.Tensor) -> torch.Tensor:
    result = t.sin()
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient * 0.5)
    return result


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "exp": lambda t: t.clamp(max=2).exp(),
    "softmax": lambda t: t.softmax(-1),
    "log_softmax": lambda t: t.log_softmax(0),
    "clone": torch.clone,
    "scaled": lambda t: t * 0.7,
    "dropout": lambda t: F.dropout(t, 0.3),
    "rrelu": lambda t: F.rrelu(t, training=True),
    "noise": lambda t: t + torch.randn_like(t) * 0.1,
    "bernoulli": lambda t: torch.empty_like(t).bernoulli_(0.5) * t,
    "layer_norm": lambda t: F.layer_norm(t, (SIZE,)),
    "normalize": lambda t: F.normalize(t, dim=0),
    "sort": lambda t: t.sort(-1).values,
    "topk": lambda t: t.topk(SIZE // 2, -1).values.repeat(1, 2),
    "gather": lambda t: t.gather(1, t.detach().argsort(1)),
    "max": lambda t: t.max(-1, keepdim=True).values * t,
    "cumsum": lambda t: t.cumsum(0) / SIZE,
    "masked_fill": lambda t: t.masked_fill(t > 0.5, 0.0),
    "where": lambda t: torch.where(t > 0, t, t * t.tanh()),
    "one_hot": lambda t: F.one_hot(t.argmax(-1), SIZE).float() + t,
    "written_empty": lambda t: torch.empty_like(t).copy_(t),
    "written_zeros": lambda t: torch.zeros_like(t).add_(t),
    "double": lambda t: t.double().sin().float(),
    "bfloat16": lambda t: t.bfloat16().tanh().float(),
    "autocast": _half,
    "complex": lambda t: torch.complex(t, t.sin()).conj().abs(),
    "chunks": lambda t: torch.cat([t, t.sin()]).chunk(2)[1],
    "stacked": lambda t: torch.stack([t, t * 0.5]).unbind(0)[1],
    "index": lambda t: t[torch.arange(SIZE - 1, -1, -1)],
    "max_pool": lambda t: F.max_pool1d(t[None], 3, 1, padding=1)[0],
    "std": lambda t: t - t.std(0, correction=0),
    "gates": _gates,
    "experts": _experts,
    "no_grad": _no_grad_statistics,
    "detached": lambda t: t.detach() * t.sigmoid(),
    "branch": _branch,
    "hooked": _hooked,
    "swish": Swish.apply,
    "quantized": Quantized.apply,
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[:],
    "reshaped": lambda t: t.reshape(-1).reshape(SIZE, SIZE),
    "unsqueezed": lambda t: t.unsqueeze(0).squeeze(0),
    "first_row": lambda t: t[:1].expand(SIZE, SIZE),
    "half_columns": lambda t: t.as_strided((SIZE, SIZE), (t.stride(0), 0), t.storage_offset()),
    "detach": lambda t: t.detach(),
    "flipped": lambda t: t.flip(0),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "mm": lambda a, b: a @ b / SIZE,
    "linear": lambda a, b: F.linear(a, b) / SIZE,
    "maximum": torch.maximum,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addmm": lambda a, b: torch.addmm(a, b, b, alpha=1 / SIZE),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "cat": lambda a, b: torch.cat([a, b], 1)[:, ::2],
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None], dropout_p=0.1)[0],
    "scatter": lambda a, b: a.scatter(1, b.detach().argsort(1)[:, :3], b[:, :3]),
    "mse": lambda a, b: a * F.mse_loss(a, b),
    "bce": lambda a, b: a * F.binary_cross_entropy_with_logits(a, b.detach().sigmoid()),
}  # fmt: skip
IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda t: t.mul_(0.5),
    "add_": lambda t: t.add_(0.1),
    "tanh_": lambda t: t.tanh_(),
    "relu_": lambda t: t.relu_(),
    "dropout_": lambda t: F.dropout(t, 0.2, inplace=True),
    "normal_": lambda t: t.normal_(),
    "rows_": lambda t: t[1:3].mul_(0.3),
    "transposed_": lambda t: t.t().add_(0.1),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 0.1),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([1]), 0.3),
    "negated_": lambda t: Negated.apply(t),
}
IN_PLACE_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "residual_": lambda a, b: a.add_(b),
    "product_": lambda a, b: a.mul_(b),
    "copied_": lambda a, b: a.copy_(b),
    "rows_": lambda a, b: a[1:].add_(b[1:]),
    "row_": lambda a, b: a.__setitem__(0, b[1]),
    "foreach_": lambda a, b: torch.ops.aten._foreach_mul_([a], [b]),
    "index_add_": lambda a, b: a.index_add_(0, torch.tensor([0, 2]), b[:2]),
}


# -- layers ------------------------------------------------------------------------------------------------------------


class Average(nn.Module):
    """A moving average, as of a batch norm, kept by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(SIZE))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(t.mean(0), alpha=0.1)
        return t - self.average.clone()


class Lookup(nn.Module):
    """A table of which the rows depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZE, SIZE)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return t + self.table(t.argmax(-1))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 2, dropout=0.1, batch_first=True)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.attention(t[None], t[None], t[None], need_weights=False)[0][0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(SIZE, SIZE, 3, padding=1)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.convolution(t[None])[0]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(SIZE, SIZE)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.cell(t, t.detach())


class Outputs(nn.Module):
    """Several outputs in a nest, one of them an integer tensor, and one its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, 2 * SIZE)

    def inner(self, t: torch.Tensor) -> dict[str, Any]:
        left, right = self.up(t).chunk(2, 1)
        return {"parts": [left, right], "index": left.argmax(-1), "same": t}

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        found = self.inner(t)
        return found["parts"][0].sigmoid() * found["parts"][1] + found["same"][found["index"]]


class Checkpointed(nn.Module):
    """The user's own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Dropout(0.1))

    def forward(self, t: torch.Tensor) -> Any:
        return checkpoint(self.inner, t, use_reentrant=False)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIZE, SIZE),
    "mlp": lambda: nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE)),
    "inplace_mlp": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True), nn.Linear(SIZE, SIZE)),
    "layer_norm": lambda: nn.LayerNorm(SIZE),
    "rms_norm": lambda: nn.RMSNorm(SIZE),
    "batch_norm": lambda: nn.BatchNorm1d(SIZE),
    "group_norm": lambda: nn.GroupNorm(4, SIZE),
    "dropout": lambda: nn.Dropout(0.2),
    "alpha_dropout": lambda: nn.AlphaDropout(0.2),
    "average": Average,
    "lookup": Lookup,
    "heads": Heads,
    "convolution": Convolution,
    "cell": Cell,
    "outputs": Outputs,
    "checkpointed": Checkpointed,
}


# -- descriptions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One line of a stage's forward.

    Args:
        kind: "unary", "opaque", "view", "binary", "in place", "in place binary", "layer", "opaque layer", "again" (a
            layer of this stage once more) or "block" (a stage inside this one).
        name: of the function or layer, in the tables above; "" for "again" and "block".
        first, second: which values it takes, counted back from the last one.
        quiet: gradients are off.
        inner: the block.
    """

    kind: str
    name: str
    first: int = 0
    second: int = 1
    quiet: bool = False
    inner: StageSpec | None = None


@dataclass(frozen=True)
class StageSpec:
    """A stage: its lines, and which values it returns, counted back from the last one."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A model.

    Args:
        stages: its stages.
        order: which of them are called, in this order.
        leaf_input: whether the first stage gets the sample itself, or what an embedding makes of it.
        keep: how many of the last values are outputs of the model.
        names_given: whether the stages are named as regions, or chosen by autoac.
        seed: of its parameters and of a step's random numbers.
    """

    stages: tuple[StageSpec, ...]
    order: tuple[int, ...]
    leaf_input: bool
    keep: int
    names_given: bool
    seed: int


TABLES: dict[str, dict[str, Any]] = {
    "unary": UNARY,
    "opaque": OPAQUE,
    "view": VIEWS,
    "binary": BINARY,
    "in place": IN_PLACE,
    "in place binary": IN_PLACE_BINARY,
    "layer": LAYERS,
    "opaque layer": OPAQUE_LAYERS,
}


# -- modules -----------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A module with the forward that its spec describes; takes and returns several matrices."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleDict()
        for index, step in enumerate(spec.steps):
            if "layer" in step.kind:
                self.layers[f"{step.name}{index}"] = TABLES[step.kind][step.name]()
            elif step.kind == "block":
                assert step.inner is not None
                self.layers[f"block{index}"] = Stage(step.inner)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        layers = list(self.layers.items())
        made = iter(layers)
        for step in self.spec.steps:
            a, b = (values[-1 - where % len(values)] for where in (step.first, step.second))
            with torch.set_grad_enabled(torch.is_grad_enabled() and not step.quiet):
                if step.kind == "block":
                    values += next(made)[1](a, b)
                elif "layer" in step.kind:
                    values.append(next(made)[1](a))
                elif step.kind == "again":
                    again = [layer for _, layer in layers if not isinstance(layer, Stage)]
                    values.append(again[step.second % len(again)](a) if again else a)
                else:
                    result = TABLES[step.kind][step.name](*((a, b) if "binary" in step.kind else (a,)))
                    if "in place" not in step.kind:
                        values.append(result)
        return tuple(values[-1 - where % len(values)] for where in self.spec.outputs)


class Model(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Linear(SIZE, SIZE)
        self.stages = nn.ModuleList(Stage(stage) for stage in spec.stages)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = x if self.spec.leaf_input else self.embed(x)
        values = [
            target.float().expand(SIZE, SIZE).contiguous().t(),
            first * 1.0 if self.spec.leaf_input else first,
        ]
        for index in self.spec.order:
            values += self.stages[index % len(self.stages)](values[-1], values[-2])
        head = F.linear(values[-1], self.embed.weight)  # so that there is something to train in every model
        return (head, *values[-self.spec.keep :])


def is_opaque(spec: ModelSpec) -> bool:
    """Whether a step of the model calls a function that torch does not see into."""

    def in_stage(stage: StageSpec) -> bool:
        return any(
            step.kind.startswith("opaque") or (step.inner is not None and in_stage(step.inner))
            for step in stage.steps
        )

    return any(in_stage(spec.stages[index % len(spec.stages)]) for index in spec.order)


def loss_of(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A scalar from all outputs."""
    return torch.stack([output.float().square().mean() for output in outputs]).sum()


def build(spec: ModelSpec) -> Model:
    """The model, always the same for the same spec."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return Model(spec)


def sample_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """A batch: floating numbers and integers."""
    generator = torch.Generator().manual_seed(spec.seed + 1)
    return {
        "x": torch.randn(SIZE, SIZE, generator=generator),
        "target": torch.randint(0, 2, (SIZE,), generator=generator),
    }


# -- strategies --------------------------------------------------------------------------------------------------------


def _steps(inner: st.SearchStrategy[StageSpec] | None, opaque: bool) -> st.SearchStrategy[Step]:
    # What is to be drawn more often comes more than once.
    first, second = st.sampled_from([0, 0, 0, 1, 2, 3]), st.integers(0, 3)
    kinds = ["unary", "unary", "unary", "view", "binary", "binary", "layer", "layer", "layer"]
    kinds += ["in place", "in place binary", "again"]
    if opaque:
        kinds += ["opaque"] * 4 + ["opaque layer"]

    def of(kind: str) -> st.SearchStrategy[Step]:
        names = st.sampled_from(list(TABLES[kind])) if kind in TABLES else st.just("")
        quiet = st.sampled_from([False] * 5 + [True]) if "in place" in kind else st.just(False)
        return st.builds(Step, st.just(kind), names, first, second, quiet)

    choices = [of(kind) for kind in kinds]
    if inner is not None:
        choices.append(st.builds(Step, st.just("block"), st.just(""), first, second, st.just(False), inner))
    return st.one_of(choices)


def _stages(
    inner: st.SearchStrategy[StageSpec] | None, most: int, opaque: bool
) -> st.SearchStrategy[StageSpec]:
    steps = st.lists(_steps(inner, opaque), min_size=3, max_size=most).map(tuple)
    outputs = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
    return st.builds(StageSpec, steps, outputs)


def models(
    most_steps: int = 9, least_calls: int = 3, most_calls: int = 6, opaque: bool = False
) -> st.SearchStrategy[ModelSpec]:
    """Specs of models.

    Args:
        most_steps: lines of a stage.
        least_calls, most_calls: of stages.
        opaque: with functions that torch does not see into, too.
    """
    stages = st.lists(_stages(_stages(None, 5, opaque), most_steps, opaque), min_size=1, max_size=3).map(
        tuple
    )
    order = st.lists(st.integers(0, 2), min_size=least_calls, max_size=most_calls).map(tuple)
    return st.builds(
        ModelSpec,
        stages,
        order,
        st.booleans(),
        st.integers(1, 3),
        st.sampled_from([True] * 7 + [False]),
        st.integers(0, 2**16),
    )
