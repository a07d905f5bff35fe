"""What is active in a thread, and how it is left."""

import torch

from autoac import torch_private
from tests.torch_private.modes import Seen


def test_what_was_entered_is_left():
    outside = torch_private.modes_entered()
    outer = Seen()
    with outer, torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), torch.device("cpu"):
        before = torch_private.modes_entered()
        for context in (
            Seen(),
            Seen(),
            torch.device("cpu"),
            torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
            torch.no_grad(),
        ):
            context.__enter__()  # and never left
        entered = torch_private.modes_entered()
        assert (entered.dispatch, entered.function) == (before.dispatch + 2, before.function + 1)
        assert entered.hooks != before.hooks
        assert before.grad
        assert not entered.grad
        torch_private.leave_modes(before)
        assert torch_private.modes_entered() == before
        torch_private.leave_modes(before)
        assert torch_private.modes_entered() == before
    assert torch_private.modes_entered() == outside


def test_mode_is_left_where_an_interrupt_came_into_its_exit():
    outside = torch_private.modes_entered()
    mode = Seen()
    mode.__enter__()
    mode.old_dispatch_mode_flags.pop()  # the first thing that its exit does, and it cannot be done twice
    torch_private.leave_modes(outside)
    assert torch_private.modes_entered() == outside
