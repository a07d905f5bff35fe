"""A call that the plan was not made for warns once, also if the plan recomputes nothing."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.execute.watch.unplanned_calls import UnplannedCalls
from autoac.integrations.planned import turn_checkpointing_off
from autoac.step.carried import planned
from autoac.step.model import own_checkpointing
from tests.small_models import least_bytes

WIDTH, ROWS = 16, 32


def make() -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3))
    model = nn.Sequential(*blocks)
    model[0].requires_grad_(False)
    return model


def train(model: nn.Module, rows: int = ROWS) -> None:
    model.zero_grad(set_to_none=True)
    model(torch.ones(rows, WIDTH)).square().mean().backward()


def with_a_larger_batch(model: nn.Module) -> None:
    train(model, 2 * ROWS)


def with_longer_rows(model: nn.Module) -> None:
    """As many elements."""
    model.zero_grad(set_to_none=True)
    model(torch.ones(1, ROWS, WIDTH)).square().mean().backward()


def with_two_calls_before_backward(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    first = model(torch.ones(ROWS, WIDTH))
    (first + model(torch.ones(ROWS, WIDTH))).mean().backward()


def under_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        train(model)


def with_gradients(model: nn.Module) -> None:
    train(model)
    model(torch.ones(ROWS, WIDTH)).square().mean().backward()


def with_a_second_derivative(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    loss = model(torch.ones(ROWS, WIDTH)).square().mean()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.grad(loss, trained, create_graph=True)


def with_others_trained(model: nn.Module) -> None:
    """As many."""
    model.get_submodule("0").requires_grad_(True)
    model.get_submodule("2").requires_grad_(False)
    train(model)


def unfrozen(model: nn.Module) -> None:
    model.requires_grad_(True)
    train(model)


CASES = {
    with_a_larger_batch: r"float32\[64,16\], and its plan was made for float32\[32,16\]",
    with_longer_rows: r"float32\[1,32,16\], and its plan was made for .* no more elements, but longer",
    with_two_calls_before_backward: "again before the backward of its previous call",
    under_autocast: "under autocast.*made for a step without autocast",
    with_gradients: "its parameters have gradients",
    with_a_second_derivative: "backward with create_graph=True, which the recorded one did not",
    with_others_trained: "the model trains other parameters than when the plan was made",
    unfrozen: "parameters have 6,384 elements, and had 4,256 when the plan was made",
}


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(scope="module")
def profile() -> autoac.Profile:
    return autoac.profile(make(), torch.ones(ROWS, WIDTH))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("act", "words"), CASES.items(), ids=lambda case: getattr(case, "__name__", ""))
def test_what_the_plan_was_not_made_for_warns_once(
    profile: autoac.Profile, act: Callable[[Any], None], words: str, recomputes: bool
):
    plan = autoac.solve(profile, profile.least_peak_bytes if recomputes else profile.peak_bytes)
    model = plan.apply(make())
    assert any(region.wrapped for region in plan.regions) is recomputes
    with no_warnings():
        for rows in (ROWS, ROWS // 2, ROWS):
            train(model, rows)
            model.zero_grad(set_to_none=True)
            model(torch.ones(ROWS, WIDTH))  # its graph dies with its output
        model.eval()(torch.ones(2 * ROWS, WIDTH))
        model.train()
    with pytest.warns(UserWarning, match=words) as told:
        act(model)
    assert len(told) == 1
    with no_warnings():
        act(model)


def test_a_second_derivative_that_is_planned_for():
    model = make()
    plan = autoac.plan(model, lambda: with_a_second_derivative(model), 10**9)
    with plan.applied(model), no_warnings():
        with_a_second_derivative(model)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x))


def test_a_head_that_the_planned_step_did_not_call_warns_once():
    model, x = TwoHeads(), torch.ones(ROWS, WIDTH)
    plan = autoac.plan(model, (x, 0), 10**9)
    plan.apply(model)
    with no_warnings():
        model(x, 0).sum().backward()
        with torch.no_grad():
            model(x, 1)
    with pytest.warns(UserWarning, match="module 'heads.1' is called, and the planned step did not") as told:
        model(x, 1).sum().backward()
    assert len(told) == 1
    with no_warnings():
        model(x, 1).sum().backward()
    plan.remove(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    both = autoac.plan(model, autoac.Samples([(x, 0), (x[:8], 1)]), 10**9)
    with both.applied(model), no_warnings():
        model(x[:8], 1).sum().backward()


class Wrapper(nn.Module):
    def __init__(self, wrapped: nn.Module):
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapped(x)


def test_a_module_that_is_replaced_under_a_plan_warns_once():
    model = make().requires_grad_(True)
    again = autoac.Policy("MUST_RECOMPUTE", op="aten.gelu*")
    plan = autoac.plan(model, torch.ones(ROWS, WIDTH), 10**9, regions=["1", "2"], policies=[again])
    plan.apply(model)
    own = model.get_submodule("2")
    model[2] = Wrapper(own)  # which runs under the plan all the same
    with no_warnings():
        train(model)
        model.zero_grad(set_to_none=True)
    with pytest.raises(autoac.PlanMismatchError):
        plan.verify(model, torch.ones(ROWS, WIDTH))
    assert planned(own)
    model[2] = own
    model[1] = make()[1].requires_grad_(True)
    with pytest.warns(UserWarning, match="module '1' was replaced after the plan was applied") as told:
        train(model)
    assert len(told) == 1
    model.zero_grad(set_to_none=True)
    with no_warnings():
        train(model)
    with pytest.raises(autoac.PlanMismatchError, match="module '1' was replaced after the plan was applied"):
        plan.verify(model, torch.ones(ROWS, WIDTH))
    assert planned(own)
    plan.remove(model)
    model.zero_grad(set_to_none=True)
    with plan.applied(model), no_warnings():
        assert plan.verify(model, torch.ones(ROWS, WIDTH)).ok
        train(model)


def test_verify_leaves_the_watch_of_a_plan_that_recomputes_nothing_as_it_was(profile: autoac.Profile):
    plan = autoac.solve(profile, "1GB")
    model = plan.apply(make())
    with no_warnings():
        assert plan.verify(model, torch.ones(ROWS, WIDTH)).ok
        other = autoac.solve(profile, "2GB")  # which is not on the model
        assert other.verify(model, torch.ones(ROWS, WIDTH)).ok
        for one in (plan, other):
            one.measure_memory(model, torch.ones(ROWS, WIDTH))
    assert len(model._forward_pre_hooks) == 1
    with pytest.warns(UserWarning, match=r"the budget is 1 GB"):
        train(model, 2 * ROWS)
    plan.remove(model)
    assert not model._forward_pre_hooks


def test_a_plan_made_in_eval_mode_is_for_training_in_it():
    model = make().eval()
    plan = autoac.plan(model, torch.ones(ROWS, WIDTH), "1GB")
    plan.apply(model)
    with no_warnings():
        train(model)
        with torch.no_grad():
            model(torch.ones(2 * ROWS, WIDTH))
    with pytest.warns(UserWarning, match=r"float32\[64,16\], and its plan was made for"):
        train(model, 2 * ROWS)


def test_samples_that_were_given_are_planned_for():
    """The highest peak is that of fewer elements."""
    few, many = torch.ones(1, 4, 64), torch.ones(64, 1, 5)
    model = Wide()
    plan = autoac.plan(model, autoac.Samples([many, few]), "1GB")
    assert plan.record.profile.sample == "float32[1,4,64]"
    plan.apply(model)
    with no_warnings():
        for x in (few, many, torch.ones(32, 1, 5)):
            model(x).mean().backward()
            model.zero_grad(set_to_none=True)
    with pytest.warns(UserWarning, match=r"float32\[2,1,128\].* but longer"):
        model(torch.ones(2, 1, 128))


def test_backward_from_any_output_ends_a_call():
    """As in a loop with a loss of its own, which still holds the model's unused one in its next call."""
    model, inputs = llama()
    profile = autoac.profile(model, inputs)
    autoac.solve(profile, 2 * profile.peak_bytes).apply(model)
    with no_warnings():
        for _ in range(3):
            output = model(**inputs)
            output.logits.square().mean().backward()
            model.zero_grad(set_to_none=True)
        kept = [model(**inputs) for _ in range(2)]  # there is room for both
    with pytest.warns(UserWarning, match="again before the backward of its previous call"):
        model(**inputs)
    del kept


class Wide(nn.Module):
    """Keeps a value for each pair of elements of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(-1) * x.unsqueeze(-2) * self.scale).exp()


def test_gradients_for_which_the_budget_has_room_do_not_warn(profile: autoac.Profile):
    model = make()
    n_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    autoac.solve(profile, profile.peak_bytes + n_bytes).apply(model)
    with no_warnings():
        with_gradients(model)


def llama() -> tuple[Any, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
    )
    ids = torch.arange(64).view(2, 32)
    return transformers.LlamaForCausalLM(config).train(), {
        "input_ids": ids,
        "labels": ids,
        "use_cache": False,
    }


def turn_checkpointing_on(model: Any) -> None:
    new = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if new else model.gradient_checkpointing_enable)()


@pytest.mark.parametrize("steps", [0, 2])
def test_the_models_own_checkpointing_after_the_plan_was_made(steps: int):
    """Trainers turn it on when training begins, others later: the plan is then idle."""
    model, sample = llama()
    profile = autoac.profile(model, sample)
    assert not any("own checkpointing" in note for note in profile.notes)
    plan = autoac.solve(profile, profile.least_peak_bytes)
    plan.apply(model)
    for _ in range(steps):
        with no_warnings():
            model(**sample).loss.backward()
            model.zero_grad()
    turn_checkpointing_on(model)
    with pytest.warns(UserWarning, match=r"the model's own \w+_checkpointing is on, and was off") as told:
        model(**sample).loss.backward()
    assert len(told) == 1
    with no_warnings():
        model(**sample).loss.backward()


def test_own_checkpointing_of_a_later_part():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = llama()[0], llama()[0]
            self.activation_checkpointing_disable = lambda: None

        @property
        def is_activation_checkpointing(self) -> bool:
            return any(getattr(module, "gradient_checkpointing", False) for module in self.modules())

        def forward(self, **sample: Any) -> Any:
            return self.first(**sample).loss + self.second(**sample).loss

    model, sample = Towers(), llama()[1]
    profile = autoac.profile(model, sample)
    autoac.solve(profile, profile.least_peak_bytes).apply(model)
    turn_checkpointing_on(model.second)
    with pytest.warns(UserWarning, match="own activation_checkpointing is on"):
        model(**sample).backward()


def test_the_models_own_checkpointing_before_the_plan_was_made():
    model, sample = llama()
    turn_checkpointing_on(model)
    for mode in ("real", "fake"):
        profile = autoac.profile(model, sample, mode=mode)
        (note,) = (note for note in profile.notes if "own checkpointing" in note)
        assert re.search(r"model\.\w+_checkpointing_disable\(\) before planning", note)
    autoac.solve(profile, profile.peak_bytes).apply(model)
    with no_warnings():
        model(**sample).loss.backward()


def test_a_loop_is_warned_of_the_models_own_checkpointing():
    model, sample = llama()
    turn_checkpointing_on(model)
    handle = autoac.auto(model, "1GB")
    model(**sample).loss.backward()
    model.zero_grad()
    with pytest.warns(
        UserWarning, match=r"own checkpointing, \w+, is on: .* Call model.\w+_checkpointing_disable\(\)"
    ) as caught:
        model(**sample)
    assert {one.filename for one in caught} == {__file__}
    handle.remove()


def test_own_checkpointing_of_a_part_from_diffusers():
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([unet])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[0](x, 3).sample

    model = Denoiser()
    assert own_checkpointing(model) == ("", "")
    unet.enable_gradient_checkpointing()
    profile = autoac.profile(model, torch.randn(1, 3, 8, 8))
    (note,) = (note for note in profile.notes if "own checkpointing" in note)
    call = re.search(r"Call (model\..*\(\)) before planning", note)
    assert call is not None
    eval(call[1], {"model": model})
    assert not unet.is_gradient_checkpointing
    unet.enable_gradient_checkpointing()
    assert turn_checkpointing_off(model) == "gradient_checkpointing"
    assert not unet.is_gradient_checkpointing


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = make()

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.blocks(x) if scale is None else self.blocks(x) * scale


def test_a_number_more_is_no_larger_batch():
    """transformers' Trainer calls its model with `num_items_in_batch`."""
    x = torch.ones(ROWS, WIDTH)
    model = Scaled()
    profile = autoac.profile(model, x)
    names = [f"blocks.{name}" for name, _ in model.blocks.named_children()]
    autoac.solve(profile, least_bytes(profile, "replay", names), regions=names).apply(model)
    with no_warnings():
        model(x, scale=torch.tensor(2.0)).square().mean().backward()
    model.zero_grad(set_to_none=True)
    with pytest.warns(UserWarning, match=r"float32\[32,16\], scale float32\[1\]") as caught:
        model(x, scale=torch.ones(1)).square().mean().backward()
    assert caught[0].filename == __file__


def test_autocast_that_begins_in_a_forward_over_the_models():
    """As accelerate puts it there for mixed precision."""
    x, model = torch.ones(ROWS, WIDTH), make()
    with torch.autocast("cpu", torch.bfloat16):
        profile = autoac.profile(model, x, loss=lambda output: output.float().square().mean())
    plan = autoac.solve(profile, profile.least_peak_bytes)
    plan.apply(model)
    over = vars(model).get("forward")
    original = model.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return original(input)

    model.forward = forward
    with no_warnings():
        model(x).float().square().mean().backward()
    assert not plan.is_not_followed
    if over is None:
        del model.forward
    else:
        model.forward = over
    model.zero_grad(set_to_none=True)
    with pytest.warns(UserWarning, match="without autocast"):
        train(model)


@pytest.mark.parametrize("budget", ["least", "1GB"])
def test_a_plan_that_recomputes_nothing_leaves_no_trace_and_gives_way_to_another(
    profile: autoac.Profile, budget: Any
):
    ample = autoac.solve(profile, "1GB")
    other = autoac.solve(profile, profile.least_peak_bytes if budget == "least" else budget)
    model = make()
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    ample.apply(model)
    other.apply(model)  # nothing has to be taken off first
    assert sum(isinstance(hook, UnplannedCalls) for hook in model._forward_pre_hooks.values()) == 1
    if budget == "least":
        ample.remove(model)  # which leaves the other's warnings on
    with pytest.warns(UserWarning, match="made for"):
        train(model, 2 * ROWS)
    other.remove(model)
    assert not model._forward_pre_hooks
    assert {name: set(vars(module)) for name, module in model.named_modules()} == names
    with no_warnings():
        train(model, 2 * ROWS)


def test_a_model_that_is_converted_to_a_larger_type_warns():
    model = make().to(torch.bfloat16)
    x = torch.ones(ROWS, WIDTH)
    autoac.plan(model, x.to(torch.bfloat16), "1GB").apply(model)
    model.float()
    with pytest.warns(UserWarning, match="trained parameters take 17.02 KB.*, and took 8.512 KB"):
        model(x)


@pytest.mark.parametrize("others", [under_autocast, with_longer_rows], ids=lambda case: case.__name__)
def test_a_larger_batch_warns_after_another_warning(others: Callable[[nn.Module], None]):
    model = make().train()
    plan = autoac.plan(model, torch.ones(ROWS, WIDTH), "1GB", loss=lambda out: out.square().mean())
    with plan.applied(model):
        with pytest.warns(UserWarning, match="its plan was made for"):
            others(model)
        with pytest.warns(UserWarning, match=r"float32\[64,16\], and its plan was made for float32\[32,16\]"):
            with_a_larger_batch(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            others(model)
            with_a_larger_batch(model)
