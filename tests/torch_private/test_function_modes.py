"""Torch function modes and torch's cross entropy."""

import subprocess
import sys

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from autoac import torch_private
from tests.torch_private.modes import Seen, SeenFunctions


def test_function_modes_see_cross_entropy_as_a_whole():
    logits, classes = torch.randn(3, 4), torch.tensor([1, 2, 3])
    assert torch_private.torchs_cross_entropy is F.cross_entropy
    assert torch_private.function_modes() == []
    with torch.device("cpu"), SeenFunctions() as mode:
        modes = torch_private.function_modes()
        assert [torch_private.is_device_mode(mode) for mode in modes] == [True, False]
        assert modes[1] is mode
        F.cross_entropy(logits, classes)
        nn.CrossEntropyLoss()(logits, classes)
    assert torch_private.function_modes() == []
    assert mode.seen == [F.cross_entropy] * 2


def test_function_modes_are_called_with_what_stands_in_cross_entropys_place(monkeypatch):
    original = F.cross_entropy
    patched = lambda *args, **kwargs: original(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(F, "cross_entropy", patched)
    logits, classes = torch.randn(3, 4), torch.tensor([1, 2, 3])
    with SeenFunctions() as mode:
        original(logits, classes)
    assert mode.seen == [patched]


def test_another_cross_entropy_in_torchs_place_is_noticed():
    program = """
import torch.nn.functional as F
original = F.cross_entropy
F.cross_entropy = lambda *args, **kwargs: original(*args, **kwargs)
from autoac import torch_private
print(torch_private.torchs_cross_entropy)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_cross_entropy_runs_the_ops_of_the_lean_one():
    for shape, kind in (((3, 4), "nll_loss"), ((2, 4, 3, 5), "nll_loss2d")):
        logits, classes = (
            torch.randn(shape, requires_grad=True),
            torch.zeros(shape[:1] + shape[2:], dtype=torch.long),
        )
        with Seen() as seen:
            F.cross_entropy(logits, classes).backward()
        assert [name for name in seen.names if "softmax" in name or "nll" in name] == [
            "aten._log_softmax.default",
            f"aten.{kind}_forward.default",
            f"aten.{kind}_backward.default",
            "aten._log_softmax_backward_data.default",
        ]


def test_a_function_mode_is_taken_off_wherever_it_is():
    first, second, third = (SeenFunctions() for _ in range(3))
    for mode in (first, second, third):
        torch_private.put_function_mode_on(mode)
    torch_private.take_function_mode_off(second)
    assert torch_private.function_modes() == [first, third]
    torch_private.take_function_mode_off(second)
    assert torch_private.function_modes() == [first, third]
    torch_private.take_function_mode_off(third)
    torch_private.take_function_mode_off(first)
    assert torch_private.function_modes() == []


def test_torch_functions_are_disabled_with_all_modes():
    with torch.device("meta"), SeenFunctions() as mode, torch_private.disable_torch_functions():
        loss = F.cross_entropy(torch.randn(3, 4), torch.tensor([1, 2, 3]))
    assert loss.device.type == "cpu"
    assert mode.seen == []
