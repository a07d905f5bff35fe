"""The file that `autoac selfcheck --report` writes."""

import json
import os

import torch

from autoac.compare.selfcheck import SelfCheck, for_an_issue


def test_it_has_what_an_issue_needs_and_no_paths():
    found = for_an_issue(SelfCheck({"on": "CPU"}, []), torch.device("cpu"))
    text = json.dumps(found)
    assert found["selfcheck"]["ok"]
    assert found["engine_costs"]["replay"]["op"] > 0
    assert found["device_bytes"] > 0
    for private in (os.getcwd(), os.path.expanduser("~"), os.uname().nodename):
        assert private not in text
