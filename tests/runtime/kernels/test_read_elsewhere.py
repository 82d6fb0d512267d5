"""What the search for reads in several layouts finds in compiled code, and what it passes over."""

from __future__ import annotations

import pytest

from tests.runtime.kernels.read_elsewhere import read_elsewhere

ROWS, TOKENS = "tensor<16x!tt.ptr<i32>, #rows>", "tensor<16x!tt.ptr<i32>, #tokens>"
WARPS = 'module attributes {{"ttg.num-warps" = {} : i32}} {{'
FUNCTION = "  tt.func public @kernel(%seq_len: !tt.ptr<i32>, %other: !tt.ptr<i32>) {"
READ_HERE = ["    %a = tt.splat %seq_len : !tt.ptr<i32>", f"    %x = tt.load %a, %ok : {ROWS}"]
READ_THERE = [
    "    %b = tt.splat %seq_len : !tt.ptr<i32>",
    "    %c = tt.addptr %b, %slot : tensor<16x!tt.ptr<i32>>",
    f"    %y = tt.load %c, %ok : {TOKENS}",
]
BARRIER = ["    ttg.barrier local|global_read|global_write"]
WRITTEN = [f"    tt.store %a, %z, %ok : {ROWS}"]
WRITTEN_ELSEWHERE = ["    %d = tt.splat %other : !tt.ptr<i32>", f"    tt.store %d, %z, %ok : {ROWS}"]


@pytest.mark.parametrize(
    ("body", "warps", "found"),
    [
        ([*READ_HERE, *READ_THERE, *WRITTEN], 4, ("seq_len",)),
        ([*READ_HERE, *READ_THERE, *BARRIER, *WRITTEN], 4, ()),
        ([*READ_HERE, *BARRIER, *READ_THERE, *WRITTEN], 4, ()),
        ([*READ_HERE, *READ_THERE, *WRITTEN], 1, ()),
        ([*READ_HERE, *WRITTEN, *READ_THERE], 4, ()),
        ([*READ_HERE, *READ_THERE, *WRITTEN_ELSEWHERE], 4, ()),
    ],
    ids=["found", "a barrier", "one read behind a barrier", "one warp", "read afterwards", "written elsewhere"],
)
def test_what_was_read_in_several_layouts_and_then_written_is_named(
    body: list[str], warps: int, found: tuple[str, ...]
) -> None:
    assert read_elsewhere("\n".join([WARPS.format(warps), FUNCTION, *body, "  }", "}"])) == found
