"""What has layers and drafts, through the service on a GPU: it changes no bit, at any depth."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from tests.gpu.test_drafts_and_structures_served import FLAGS, TOGETHER, compare_all, grown, plain_requests
from tests.parity.drafters import flags_of
from tests.parity.figures import check_at_rest, check_depth
from tests.parity.recurrent_checkpoints import HEADED_IN_TILES, HEADED_QWEN3_5, checkpoint_of
from tests.parity.services import DEPTHS, figures_everywhere, run_everywhere, services_at_every_depth

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

REQUESTS = 32
OVER_STATES = HEADED_IN_TILES, HEADED_QWEN3_5


def of_the_model(flags: list[str]) -> list[str]:
    """Those that name the model that is served, which is the bundled one where none do."""
    model = flags[flags.index("--model") + 1] if "--model" in flags else str(BUNDLED_FOLDER)
    return ["--model", model]


def drafting(kind: str, folder: Path) -> list[str]:
    """Flags of a service in which this drafts."""
    if kind not in OVER_STATES:
        return flags_of(kind, folder)
    return ["--drafter", "mtp", "--model", str(checkpoint_of(kind, folder))]


@pytest.mark.parametrize("kind", ["eagle-1", "mtp", *OVER_STATES, "model"])
def test_what_drafts_changes_no_bit_of_what_a_service_says_at_any_depth(kind: str, tmp_path: Path) -> None:
    """The bundled model's own head, one that comes with a checkpoint, those of two checkpoints whose models keep
    recurrent states, and a whole model."""
    flags = drafting(kind, tmp_path)
    plain_flags, drafting_flags = (*FLAGS, *of_the_model(flags)), (*FLAGS, *flags, "--draft-tokens", "3")
    with (
        services_at_every_depth(lambda i: plain_flags, ("serial",)) as without,
        services_at_every_depth(lambda i: drafting_flags) as with_drafts,
    ):
        asked = plain_requests()[:REQUESTS]
        before = asyncio.run(figures_everywhere(with_drafts))
        for first in range(0, REQUESTS, TOGETHER):
            some = asked[first : first + TOGETHER]
            answers = asyncio.run(run_everywhere({"without": without["serial"], **with_drafts}, some))
            for depth in DEPTHS:
                compare_all(some, answers["without"], answers[depth], f"depth {depth}")
        for depth, stats in asyncio.run(figures_everywhere(with_drafts)).items():
            since = grown(before[depth], stats)
            overlap = stats.chain.overlap_ratio
            print(f"{kind}, depth {depth}: {since}, {dict(stats.graphs.fallbacks)}, overlap {overlap:.3f}")
            check_depth(stats, depth)
            check_at_rest(stats, 0)
            assert 0 < since["right"] < since["drafted"], "drafts were looked at, and not all were right"
