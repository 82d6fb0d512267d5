"""Recurrent mixers whose heads ranks have between them, by the Triton kernels: a part is a mixer like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import GatedDelta, Mamba2  # noqa: E402
from runahead.runtime.kernels.ranks import WHOLE  # noqa: E402
from tests.gpu.gpu_chain import moved  # noqa: E402
from tests.runtime.kernels.recurrent_batches import Row  # noqa: E402
from tests.runtime.kernels.recurrent_mixers import Mixer, held_states  # noqa: E402
from tests.runtime.kernels.test_expert_shares import ranks  # noqa: E402
from tests.runtime.kernels.test_triton_recurrent_chunks import chunks  # noqa: E402
from tests.runtime.kernels.test_triton_recurrent_rows import one_token  # noqa: E402
from tests.runtime.models.shared_models import config_of, layers_of, normed, parts_of_states, projected  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]
Kernels = Callable[[Mixer, torch.Tensor, tuple[torch.Tensor, ...], Sequence[Row]], torch.Tensor]
DECODING = (Row(2, 7, 1), Row(0, 0, 1), Row(1, 3, 1, alive=False), Row(4, 1, 1))
PROMPTS = (Row(2, 0, 35), Row(0, 21, 2), Row(1, 3, 4, alive=False), Row(4, 9, 30))


@pytest.mark.parametrize(
    ("kernels", "rows"), [(one_token, DECODING), (chunks, PROMPTS)], ids=["rows that decode", "prompts"]
)
@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("architecture", ["BambaForCausalLM", "Qwen3NextForCausalLM"])
def test_states_of_ranks_side_by_side_are_the_whole_s_and_their_sums_add_up(
    architecture: str, of: int, kernels: Kernels, rows: Sequence[Row]
) -> None:
    whole, *parts = (layer.mixer for layer in layers_of(config_of(architecture), [WHOLE, *ranks(of)])[0])
    assert isinstance(whole, Mamba2 | GatedDelta)
    x, states = normed(sum(row.count for row in rows)), held_states(whole)
    held = parts_of_states(whole, states, of)

    def made(mixer: Mixer, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What the mixer adds to the residual but for its bias, [T, hidden], float64. states: changed in place."""
        on_device = moved(states, DEVICE)
        y = kernels(mixer, projected(mixer, x), on_device, rows)
        for one, other in zip(states, on_device, strict=True):
            one.copy_(other)
        return y.double() @ mixer.out.weight.double().T

    expected, total = made(whole, states), torch.zeros(len(x), 64, dtype=torch.float64)
    for part, own in zip(parts, held, strict=True):
        assert isinstance(part, Mamba2 | GatedDelta)
        total += made(part, tuple(own))
    assert relative_error(total, expected) < 2e-5
    for own, left in zip(held, parts_of_states(whole, states, of), strict=True):
        for one, other in zip(own, left, strict=True):
            assert relative_error(one, other) < 2e-5
