"""The options of CUDA's caching allocator: as torch reads them, and what torch refuses is refused."""

import json
import subprocess
import sys

import pytest

from autoac_solver.allocator.options import MIB, AllocatorOptions, options_in_environment, parse_options
from autoac_solver.records.errors import AllocatorOptionsError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorOptions()),
        ("backend:native", AllocatorOptions()),
        ("expandable_segments:True", AllocatorOptions(expandable_segments=True)),
        (
            " max_split_size_mb : 64 ,expandable_segments:False",
            AllocatorOptions(max_split_bytes=64 * MIB),
        ),
        ("garbage_collection_threshold:0.8", AllocatorOptions(garbage_collection_threshold=0.8)),
        ("per_process_memory_fraction:0.5", AllocatorOptions(memory_fraction=0.5)),
        ("roundup_power2_divisions:4", AllocatorOptions(roundup_power2_divisions=(4,) * 16)),
        (
            # What torch's documentation has: 1 below 256 MiB and for 256, 2 for 512, 4 for 1024, 8 from then on. The
            # intervals in between stay as they are, and ">" begins at the last one named.
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            AllocatorOptions(roundup_power2_divisions=(1,) * 9 + (2,) + (8,) * 6),
        ),
        (
            "large_segment_size_mb:40",
            AllocatorOptions(large_segment_bytes=40 * MIB, max_non_split_rounding_bytes=40 * MIB),
        ),
        (
            "pinned_use_background_threads:True,max_split_size_mb:20",
            AllocatorOptions(max_split_bytes=20 * MIB),
        ),
        ("max_non_split_rounding_mb:30", AllocatorOptions(max_non_split_rounding_bytes=30 * MIB)),
    ],
)
def test_what_options_say(text: str, expected: AllocatorOptions):
    assert parse_options(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "magic:True",
            "'magic', whose effect on reserved memory is not known; known are backend, expandable",
        ),
        ("backend:cudaMallocAsync", "another allocator than torch's native one"),
        ("expandable_segments:yes", "possible are True and False"),
        ("max_split_size_mb:19", "at least 20"),
        ("large_segment_size_mb:40,max_split_size_mb:30", "at least 40"),
        ("max_split_size_mb:64x", "no whole number"),
        ("max_split_size_mb", "not of the form"),
        ("large_segment_size_mb:10", "greater than 10"),
        ("garbage_collection_threshold:1.0", "less than 1"),
        ("garbage_collection_threshold:nan", "no share"),
        ("roundup_power2_divisions:3", "no power of two"),
        ("roundup_power2_divisions:[255:1]", "no power of two"),
        ("roundup_power2_divisions:[256:1", "does not end with ']'"),
        (",", "not of the form"),
    ],
)
def test_refused(text: str, message: str):
    with pytest.raises(AllocatorOptionsError, match=message):
        parse_options(text)


def test_torchs_own_variables_in_torchs_order():
    assert options_in_environment({}) == ""
    both = {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}
    assert options_in_environment(both) == "b:2"
    assert options_in_environment({"PYTORCH_ALLOC_CONF": "a:1"}) == "a:1"


TEXTS = [
    *("large_segment_size_mb:12", "large_segment_size_mb:10", "large_segment_size_mb:11"),
    *("max_split_size_mb:20", "max_split_size_mb:19", "large_segment_size_mb:40,max_split_size_mb:30"),
    *("max_non_split_rounding_mb:20", "max_non_split_rounding_mb:19", "garbage_collection_threshold:0.5"),
    *("garbage_collection_threshold:1.0", "garbage_collection_threshold:0.0", "expandable_segments:true"),
    *("expandable_segments:True", "roundup_power2_divisions:4", "roundup_power2_divisions:6"),
    *("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "roundup_power2_divisions:[256:3]"),
    *("roundup_power2_divisions:[100:2]", "roundup_power2_divisions:[256:0,>:4]", "max_split_size_mb"),
    *("pinned_max_cached_size_mb:3", " expandable_segments : True , max_split_size_mb:64"),
    *("garbage_collection_threshold:abc", "roundup_power2_divisions:0", "backend:native"),
]
ASK_TORCH = """
import json, sys, torch
accepted = []
for text in json.load(sys.stdin):
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,max_non_split_rounding_mb:20")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        accepted.append(True)
    except (ValueError, RuntimeError):
        accepted.append(False)
print(json.dumps(accepted))
"""


def test_the_installed_torch_accepts_and_refuses_the_same():
    """In a process of its own, since torch keeps what it was told."""
    pytest.importorskip("torch")
    run = subprocess.run(
        [sys.executable, "-c", ASK_TORCH], input=json.dumps(TEXTS), capture_output=True, text=True, check=True
    )

    def accepted(text: str) -> bool:
        try:
            parse_options(text)
        except AllocatorOptionsError:
            return False
        return True

    assert dict(zip(TEXTS, json.loads(run.stdout), strict=True)) == {t: accepted(t) for t in TEXTS}
