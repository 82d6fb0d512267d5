"""A GGUF file that can't be served is refused by name, with what to do, and before an engine is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from runahead.runtime.checkpoint import CheckpointError, check_files, locate, open_checkpoint
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import check_weights
from tests.runtime.checkpoint.gguf_files import llama, write

INSTEAD = "instead, serve the model's checkpoint in the Hugging Face layout: fetch it with `hf download"
NONE = np.zeros(1, np.float32)


def check(path: Path) -> None:
    """As a start does, from the first look at the file to the last before weights are read."""
    check_files(path, has_weights=True)
    checkpoint = open_checkpoint(path)
    check_weights(checkpoint, load_config(checkpoint))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"llama.block_count": None}, r"has no llama\.block_count; fetch"),
        ({"llama.block_count": [3, 4]}, r"llama\.block_count 2 values, one for each layer, where only .*" + INSTEAD),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, r"llama\.attention\.head_count_kv 3 values.*" + INSTEAD),
        ({"llama.embedding_length": "64"}, r"llama\.embedding_length '64' where only one number of 1 or more"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, r"layer_norm_rms_epsilon -1\.0 where only above 0"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type 'yarn'; supported are .*" + INSTEAD),
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count 8 with heads of 16.*" + INSTEAD),
        ({"llama.attention.value_length": 8}, r"llama\.attention\.value_length 8 with heads of 16.*" + INSTEAD),
        ({"llama.expert_count": 8}, r"llama\.expert_count 8, which is a mixture of experts.*" + INSTEAD),
        ({"llama.attention.sliding_window": 64}, r"llama\.attention\.sliding_window 64, which lets.*" + INSTEAD),
        ({"llama.logit_scale": 0.5}, r"may change what the model computes: llama\.logit_scale; " + INSTEAD),
        ({"split.count": 3}, r"one part of a GGUF that is split .* `llama-gguf-split --merge FIRST-PART WHOLE\.gguf`"),
        ({"general.type": "adapter"}, r"is a LoRA adapter and no model: `llama-export-lora -m BASE\.gguf"),
        ({"general.type": "mmproj"}, r"of the type 'mmproj' and no model that generates text.*" + INSTEAD),
        ({"llama.vocab_size": 7}, r"token_embd\.weight has shape .*; the file's metadata ask for \[7, 64\]"),
        ({"llama.feed_forward_length": 128}, r"ffn_gate\.weight has shape \[96, 64\].* ask for \[128, 64\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_metadata_that_can_not_be_served_are_refused_by_the_key(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "tiny.gguf", llama(), changes=changes)
    with pytest.raises(CheckpointError, match=sentence):
        check(path)


def test_keys_that_change_no_number_are_passed_over(tmp_path: Path) -> None:
    neutral = {
        "llama.expert_count": 0,
        "llama.expert_used_count": 0,
        "llama.tensor_data_layout": "Meta AI original pth",
    }
    check(write(tmp_path / "tiny.gguf", llama(), changes={**neutral, "general.name": "x", "anybody.else": 1}))


def test_another_architecture_is_refused_by_its_name_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama(), architecture="qwen3moe")
    with pytest.raises(CheckpointError, match=r"architecture 'qwen3moe'; of GGUF files only 'llama'.*" + INSTEAD):
        check(path)


def test_a_quantisation_that_is_not_supported_is_refused_by_its_name_and_the_tensor_s(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama(hidden_size=256), {"ffn_up": Kind.TQ2_0})
    with pytest.raises(
        CheckpointError, match=r"tensor blk\.0\.ffn_up\.weight is stored as TQ2_0; supported are F32, .*llama-quantize"
    ):
        check(path)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"blk.0.attn_sinks.weight": NONE},
            r"has a tensor blk\.0\.attn_sinks\.weight, which LlamaForCausalLM",
        ),
        ({"blk.7.attn_norm.weight": NONE}, r"has a tensor blk\.7\.attn_norm\.weight, which"),
        ({"rope_freqs.weight": np.full(8, 3, np.float32)}, r"by rope_freqs\.weight in another way than Llama 3\.1"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, r"by rope_freqs\.weight in another way than Llama 3\.1"),
    ],
)
def test_a_tensor_that_is_not_understood_is_refused_by_the_files_own_name(
    more: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        check(write(tmp_path / "tiny.gguf", llama(), more=more))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama(), changes={"llama.block_count": 4})
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.3\.input_layernorm\.weight; fetch"):
        check(path)


def test_a_file_that_is_cut_off_is_refused_by_the_first_tensor_that_is_not_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama())
    last = gguf.GGUFReader(path).tensors[-1]
    path.write_bytes(path.read_bytes()[: last.data_offset + 8])
    with pytest.raises(CheckpointError, match=rf"tensor {last.name} of .* is cut off .*fetch the file again"):
        check(path)


def test_every_shorter_file_is_refused_in_bounded_time(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama())
    whole = path.read_bytes()
    header = gguf.GGUFReader(path).data_offset
    for size in range(0, header, 97):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            check(path)


def test_a_list_that_claims_to_be_endless_is_refused_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama())
    whole = path.read_bytes()
    place = whole.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    path.write_bytes(whole[:place] + (1 << 60).to_bytes(8, "little") + whole[place + 8 :])
    with pytest.raises(CheckpointError, match=r"is truncated or has a corrupt header: .*fetch the file again"):
        check(path)


@pytest.mark.parametrize(
    ("begin", "sentence"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid", r"Git LFS pointer .*`git lfs pull` in "),
        (b"PK\x03\x04 something else", "is not a GGUF file"),
        (b"", "is not a GGUF file"),
        (b"GGUF\x01\0\0\0", "GGUF of version 1; supported are 2 and 3: fetch a newer file"),
        (b"GGUF\0\0\0\x03", "big-endian machines: `gguf-convert-endian tiny.gguf little`"),
    ],
    ids=["pointer", "zip", "empty", "old", "big-endian"],
)
def test_a_file_that_does_not_begin_like_a_gguf_file_is_refused_with_what_to_do(
    begin: bytes, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(begin)
    with pytest.raises(CheckpointError, match=sentence):
        check(path)


def test_without_the_extra_a_sentence_says_what_to_install(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama())
    program = (
        "import sys\nfrom pathlib import Path\nsys.modules['gguf'] = None\n"
        "from runahead.runtime.checkpoint import CheckpointError, open_checkpoint\n"
        "try:\n    open_checkpoint(Path(sys.argv[1]))\nexcept CheckpointError as error:\n    print(error)"
    )
    command = [sys.executable, "-P", "-c", program, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("the extra gguf is not installed: pip install 'runahead-server[gguf]'\n")


def test_the_header_is_read_without_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama())
    program = (
        "import sys\nfrom pathlib import Path\nfrom runahead.runtime.checkpoint import check_files, open_checkpoint\n"
        "check_files(Path(sys.argv[1]), has_weights=True)\nopen_checkpoint(Path(sys.argv[1])).tokenizer()\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", program, str(path)], check=True, timeout=60)


def test_a_models_name_is_the_files_without_its_end(tmp_path: Path) -> None:
    assert locate.model_name(tmp_path / "SmolLM2-135M.Q4_1.gguf") == "SmolLM2-135M.Q4_1"
    assert locate.model_name(tmp_path / "qwen3-0.6b") == "qwen3-0.6b"
