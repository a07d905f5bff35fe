"""torch's own planner."""

import inspect
import types

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from autoac import torch_private


def test_torchs_planner_is_where_it_was_and_takes_what_it_took():
    pytest.importorskip("pwlf")
    tools = torch_private.sac_tools()
    assert list(inspect.signature(tools.sac_milp).parameters)[:2] == ["graph", "memory_budget"]
    assert "ac_units" in inspect.signature(tools.sac_milp).parameters
    policy = tools.get_optimal_checkpointing_policy_per_module
    assert list(inspect.signature(policy).parameters) == ["sac_stats", "memory_budget"]
    assert torch.ops.aten.detach.default in tools.OPS_TO_ALWAYS_SKIP
    assert callable(tools.SACEstimator()._estimate_runtime)
    estimator = tools.RuntimeEstimator()
    estimator("operator-level-cost-model")  # what chooses the estimate that is replaced here
    assert callable(estimator._estimate)


def test_the_planners_own_benchmark_is_replaced_where_it_knows_no_device():
    estimators = (
        types.SimpleNamespace(_estimate_runtime="its own"),
        types.SimpleNamespace(_estimate_runtime="its own"),
    )
    timed = lambda func, args, kwargs: (None, 0.0)  # noqa: E731
    for estimator, device in zip(estimators, ("cpu", "cuda"), strict=True):
        torch_private.time_ops_with(estimator, timed, torch.device(device))
    assert [estimator._estimate_runtime for estimator in estimators] == [timed, "its own"]


def test_the_runtime_estimator_takes_no_times():
    pytest.importorskip("pwlf")
    estimator = torch_private.sac_tools().RuntimeEstimator()
    torch_private.time_nothing(estimator)
    with torch_private.FakeTensorMode():  # torch asks for it
        model = nn.Linear(2, 2)
        with estimator:
            model(torch.ones(2)).sum().backward()
    assert estimator.mod_fw_pre_order == ["Linear"]
    assert set(estimator.mod_runtimes["Linear"].values()) <= {0.0}
