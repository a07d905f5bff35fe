"""The hook by which inductor is given a partitioner. Nothing here is compiled to the end, which would take seconds."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import exc
from torch._functorch import partitioners
from torch.nn import functional as F

from autoac import torch_private
from autoac.execute.compiled.partitioner import PointPartitioner, Surveyed, Surveyor
from autoac.torch_private import partitioner
from autoac.torch_private.partitioner import JointGraph


class Stopped(Exception):
    """Raised in place of compiling, with what was found."""


class Looking(partitioner.CustomPartitionerFn):
    """Stops the compiler with what `look` says of a graph, or of the forward and backward that it was parted into."""

    look: Callable[[JointGraph], Any]
    choose: Callable[[JointGraph], list[Any]] | None = None

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        def look(graph: JointGraph) -> list[Any]:
            if self.choose is None:
                raise Stopped(type(self).look(graph))
            return type(self).choose(graph)  # type: ignore[misc]

        parts = partitioner.partitioned(look, gm, joint_inputs, **kwargs)
        raise Stopped(parts)

    def uuid(self) -> None:
        return None


def found(function: Callable[..., Any], *args: Any, **said: Any) -> Any:
    """What a partitioner that looks finds in a function's graph."""
    looking = type("LookingNow", (Looking,), said)()
    torch._dynamo.reset()
    options: dict[str, Any] = {torch_private.COMPILE_OPTION: looking}
    with pytest.raises(exc.BackendCompilerFailed) as caught:
        torch.compile(function, fullgraph=True, options=options)(*args)
    stopped = torch_private.raised_in_compiler(caught.value, Stopped)
    assert stopped is not None
    assert torch_private.innermost(caught.value) is stopped
    assert torch_private.is_of_compiler(caught.value)
    assert torch_private.first_line(caught.value).startswith("Stopped: ")
    return stopped.args[0]


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = F.dropout(torch.relu(x @ weight), 0.5)
    return F.scaled_dot_product_attention(hidden, hidden, hidden) @ weight


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def test_heavy_ops_are_products_and_attention():
    heavy = found(block, *inputs(), look=lambda graph: graph.heavy)
    assert [op.name for op in heavy] == ["mm", "_scaled_dot_product_flash_attention_for_cpu", "mm"]
    assert heavy[0].flops == 2 * 48 * 8 * 8
    assert heavy[1].flops == 4 * 6 * 8 * 8 * 8
    assert heavy[0].bytes == 48 * 8 * 4


def test_convolutions_and_ops_that_torch_does_not_know_are_heavy():
    with torch.library._scoped_library("autoac_test", "FRAGMENT") as library:
        library.define("cube(Tensor x) -> Tensor")
        library.impl("cube", lambda x: x**3, "CompositeExplicitAutograd")
        torch.library.register_fake("autoac_test::cube", torch.empty_like, lib=library)
        torch.library.register_autograd(
            "autoac_test::cube",
            lambda ctx, grad: grad * 3,
            setup_context=lambda ctx, inputs, output: None,
            lib=library,
        )
        net = nn.Conv2d(2, 2, 3)

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.autoac_test.cube(net(x)).sin()

        heavy = found(function, torch.randn(1, 2, 5, 5, requires_grad=True), look=lambda graph: graph.heavy)
    assert [op.name for op in heavy] == ["convolution", "cube"]


def test_random_ops_are_seen():
    x, weight = inputs()
    assert found(block, x, weight, look=lambda graph: graph.draws)

    def attends(x: torch.Tensor) -> torch.Tensor:  # torch marks the kernel as random whether it draws or not
        return F.scaled_dot_product_attention(x, x, x)

    assert not found(attends, x, look=lambda graph: graph.draws)
    assert not found(attends, x, look=lambda graph: graph.is_tagged)


def test_what_is_kept():
    """The heavy ops asked for, and seeds always; masks are made again from them."""

    def kept(graph: JointGraph) -> list[tuple[list[str], int]]:
        chosen = [graph.kept_with(heavy) for heavy in ((), (0,), (0, 1))] + [graph.kept_by_torch(1.0)]
        return [([node.name for node in values], graph.kept_bytes(values)) for values in chosen]

    nothing, first, attention, torchs = found(block, *inputs(), look=kept)
    seed, hidden, row = (
        8,
        48 * 8 * 4,
        48 * 4,
    )  # of one random op; of a matrix; attention also keeps a number a row
    for names, _ in (nothing, first, attention):
        assert any("seed" in name for name in names)
    assert (nothing[1], first[1]) == (seed, hidden + seed), (nothing, first)
    assert attention[1] == first[1] + hidden + row
    assert torchs[1] >= attention[1]


def test_ops_that_choose_run_once():
    """A router's experts: values computed again may differ in the last bits, and give others."""

    def routed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weights, chosen = (x @ weight).softmax(-1).topk(2)
        return x * (weights * (chosen == 0)).sum(-1, keepdim=True)

    x, weight = inputs()
    forward, backward = found(routed, x, weight, choose=staticmethod(lambda graph: graph.kept_with(())))
    assert any("topk" in str(node.target) for node in forward.graph.nodes)
    assert not any("topk" in str(node.target) for node in backward.graph.nodes)


def test_attention_that_draws_is_not_run_again(monkeypatch: pytest.MonkeyPatch):
    """On CUDA its dropout is inside of the kernel: another run would have another mask."""
    draws = partitioner._draws
    monkeypatch.setattr(partitioner, "_draws", lambda node: "attention" in str(node.target) or draws(node))

    def chosen(graph: JointGraph) -> list[Any]:
        assert [op.name for op in graph.heavy] == ["mm", "_scaled_dot_product_flash_attention_for_cpu", "mm"]
        return graph.kept_with(())

    _, backward = found(block, *inputs(), choose=staticmethod(chosen))
    ops = [str(node.target) for node in backward.graph.nodes]
    assert not any("flash_attention_for_cpu.default" in op for op in ops)


def test_higher_order_ops_run_once():
    def branches(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x @ weight,))
        return found * found

    x, weight = inputs()
    _, backward = found(branches, x, weight, choose=staticmethod(lambda graph: graph.kept_with(())))
    conditions = [node for node in backward.graph.nodes if "cond" in str(node.target)]
    assert len(conditions) == 1  # that of the gradient


def test_forward_and_backward_keep_what_was_chosen():
    before = partitioners.choose_saved_values_set
    forward, backward = found(block, *inputs(), choose=staticmethod(lambda graph: graph.kept_with(())))
    assert partitioners.choose_saved_values_set is before
    [outputs] = [node.args[0] for node in forward.graph.nodes if node.op == "output"]
    assert len(outputs) == 1 + 3  # the result; both inputs and the seed
    ops = [str(node.target) for node in backward.graph.nodes if node.op == "call_function"]
    assert sum("flash_attention_for_cpu.default" in op for op in ops) == 1  # run again, before its backward
    assert not any("inductor_seeds" in op for op in ops)


def test_partitioners_can_be_copied_and_pickled_and_are_told_apart():
    partitioners = [PointPartitioner(point) for point in ("save:", "save:0", "torch:1", "torch:0.5")]
    for one in partitioners:
        for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert copied.uuid() == one.uuid()
    assert len({one.uuid() for one in partitioners}) == 4
    assert Surveyor(3, frozenset()).uuid() is None
    assert partitioner.hash_of_files((__file__,)) != partitioner.hash_of_files((partitioner.__file__,))


def test_recompile_limit():
    assert torch_private.is_recompile_limit(exc.FailOnRecompileLimitHit("limit"))
    assert not torch_private.is_recompile_limit(RuntimeError("limit"))
    assert torch_private.is_of_compiler(exc.FailOnRecompileLimitHit("limit"))
    with torch._dynamo.config.patch(recompile_limit=77):
        assert torch_private.recompile_limit() == 77
    assert not torch_private.is_of_compiler(RuntimeError("limit"))
    assert torch_private.raised_in_compiler(RuntimeError("limit"), Surveyed) is None
