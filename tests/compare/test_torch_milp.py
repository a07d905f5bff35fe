"""torch's own planner gets its best chance."""

import pytest
import torch

from autoac.compare import torch_milp
from autoac.compare.workload import Workload
from tests.small_models import batch, make

CPU = torch.device("cpu")


@pytest.mark.parametrize("lucky", [1, 3])
def test_its_random_fit_is_made_again_where_it_leads_to_no_advice(
    lucky: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: list[torch_milp._Planner] = []

    def init(self: torch_milp._Planner, workload: Workload, device: torch.device) -> None:
        fits.append(self)

    monkeypatch.setattr(torch_milp._Planner, "__init__", init)

    def decide(self: torch_milp._Planner, budget_bytes: int) -> dict[str, tuple[int, ...]]:
        return {"blocks.0": (1, 0)} if len(fits) == lucky else {}

    monkeypatch.setattr(torch_milp._Planner, "decide", decide)
    workload = Workload("small", "Small", make(), batch(), ("blocks.0", "blocks.1"))
    (strategy,) = torch_milp.advised(workload, CPU, {"budget 1": 10, "budget 2": 20})
    assert (strategy.name, strategy.error) == ("torch sac_milp, budget 1", "")  # the same advice counts once
    assert len(fits) == lucky
    fits.extend(fits * 3)
    (strategy,) = torch_milp.advised(workload, CPU, {"budget 1": 10})
    assert strategy.error == "gives no advice at any budget"
