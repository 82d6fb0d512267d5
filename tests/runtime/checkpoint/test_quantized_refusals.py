"""What is wrong with a quantized checkpoint is said by the tensor's or the key's name, and nothing is served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import CheckpointError, check_files, open_checkpoint
from runahead.runtime.checkpoint.quantized.tensor import QuantizedTensor
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from tests.runtime.checkpoint.quantize import quantize
from tests.runtime.models.checkpoints import CASES, save

LAYER = "model.layers.1.mlp.down_proj"  # [64, 96]
GROUP = 16

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], Any]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save(CASES[0], folder)
    return folder


def edited(plain: Path, folder: Path, name: str, edit: Edit) -> None:
    quantize(plain, folder, name, GROUP)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)


def put(part: str, index: Any, value: float) -> Edit:
    def edit(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{part}"][index] = value

    return edit


def without(part: str) -> Edit:
    return lambda tensors: tensors.pop(f"{LAYER}.{part}")


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{part}"] = change(tensors[f"{LAYER}.{part}"])

    return edit


def added(name: str, tensor: torch.Tensor) -> Edit:
    return lambda tensors: tensors.update({name: tensor})


def numbered(cases: tuple[tuple[str, Edit, str], ...]) -> list[str]:
    return [f"{number} {name}" for number, (name, _, _) in enumerate(cases)]


HEADERS: tuple[tuple[str, Edit, str], ...] = (
    ("fp8-per-channel", without("weight_scale"), "weight is stored as F8_E4M3 and has no {}.weight_scale"),
    ("fp8-blocks", without("weight_scale_inv"), "weight is stored as F8_E4M3 and has no {}.weight_scale"),
    ("int8-per-channel", without("weight_scale"), "weight is stored as I8 and has no {}.weight_scale"),
    ("int4-packed", without("weight_scale"), "quantized weight {} has no tensor {}.weight_scale"),
    ("int4-packed-zeros", without("weight_zero_point"), "has no tensor {}.weight_zero_point"),
    ("int4-packed-ordered", without("weight_g_idx"), "has no tensor {}.weight_g_idx"),
    ("gptq-int4", without("scales"), "has no tensor {}.scales"),
    ("gptq-int4", without("qzeros"), "has no tensor {}.qzeros"),
    ("gptq-int4-ordered", without("g_idx"), "has no tensor {}.g_idx"),
    ("awq-int4", without("qzeros"), "has no tensor {}.qzeros"),
    ("awq-int4", without("qweight"), "tensor {}.(qzeros|scales) is part of a quantized weight"),
    ("fp8-per-channel", without("weight"), "tensor {}.weight_scale is part of a quantized weight"),
    (
        "fp8-per-channel",
        changed("weight_scale", lambda scale: scale[:63]),
        r"{}.weight_scale has shape \[63, 1\]; of fp8",
    ),
    (
        "fp8-per-tensor",
        changed("weight_scale", lambda scale: scale.repeat(3)),
        r"{}.weight_scale has shape \[3\]; of fp8",
    ),
    (
        "fp8-blocks",
        changed("weight_scale_inv", lambda scale: scale.repeat(2, 1)),
        r"{}.weight_scale_inv has shape \[2, 1\]",
    ),
    (
        "fp8-per-channel",
        changed("weight_scale", torch.Tensor.int),
        "{}.weight_scale is stored as I32; .*F32 or F16 or BF16",
    ),
    ("fp8-per-channel", changed("weight", torch.Tensor.bfloat16), "{}.weight is stored as BF16; .*must be F8_E4M3"),
    ("int4-packed", changed("weight_scale", lambda scale: scale[:, :5]), r"{}.weight_scale has shape \[64, 5\]"),
    ("int4-packed", changed("weight_shape", lambda shape: shape * 2), "{}.weight_shape says 192 columns, and 96 are"),
    ("int4-packed", changed("weight_packed", lambda words: words.float()), "{}.weight_packed is stored as F32"),
    ("int4-packed", changed("weight_packed", lambda words: words[:32]), r"{}.weight_scale has shape \[64, 6\]"),
    ("gptq-int4", changed("qweight", lambda words: words[:10]), r"{}.scales has shape \[6, 64\]; .*must be \[5, 64\]"),
    ("gptq-int4", changed("qzeros", lambda words: words[:, :7]), r"{}.qzeros has shape \[6, 7\]; .*must be \[6, 8\]"),
    ("gptq-int4", changed("g_idx", lambda groups: groups[:95]), r"{}.g_idx has shape \[95\]; .*must be \[96\]"),
    ("gptq-int4", changed("qweight", torch.Tensor.flatten), r"{}.qweight has shape \[768\]; it must have 2 sizes"),
    ("awq-int4", changed("qzeros", lambda words: words.T), r"{}.qzeros has shape \[8, 6\]; .*must be \[6, 8\]"),
    ("awq-int4", added(f"{LAYER}.weight", torch.zeros(64, 96)), "tensor {}.weight is there twice: by itself"),
    (
        "gptq-int4",
        added("model.layers.1.mlp.up_proj.weight_packed", torch.zeros(2, 2)),
        "up_proj.weight_packed is part",
    ),
)


@pytest.mark.parametrize(("name", "edit", "sentence"), HEADERS, ids=numbered(HEADERS))
def test_what_the_headers_show_is_refused_before_weights_are_read(
    name: str, edit: Edit, sentence: str, plain: Path, tmp_path: Path
) -> None:
    edited(plain, tmp_path, name, edit)
    with pytest.raises(CheckpointError, match=sentence.replace("{}", re.escape(LAYER))):
        check_files(tmp_path, has_weights=True)


NUMBERS: tuple[tuple[str, Edit, str], ...] = (
    ("fp8-per-channel", put("weight_scale", (3, 0), float("nan")), "{}.weight_scale holds a scale that is not finite"),
    (
        "fp8-blocks",
        put("weight_scale_inv", (0, 0), float("inf")),
        "{}.weight_scale_inv holds a scale that is not finite",
    ),
    ("fp8-per-channel", put("weight_scale", (3, 0), 0.0), "{}.weight_scale holds a scale of zero"),
    ("int4-packed", put("weight_scale", (3, 1), 0.0), "{}.weight_scale holds a scale of zero"),
    ("gptq-int4", put("scales", (1, 3), float("nan")), "{}.scales holds a scale that is not finite"),
    ("awq-int4", put("scales", (1, 3), 0.0), "{}.scales holds a scale of zero"),
    ("gptq-int4-ordered", put("g_idx", 7, 6), "{}.g_idx holds groups from 0 to 6, and there are 6"),
    ("gptq-int4-ordered", put("g_idx", 7, -2), "{}.g_idx holds groups from -2 to 5, and there are 6"),
    ("int4-packed-ordered", put("weight_g_idx", 7, -1), "{}.weight_g_idx holds groups from -1 to 5"),
    ("fp8-per-tensor", put("weight", (1, 1), float("nan")), "{}.weight holds NaN"),
)


@pytest.mark.parametrize(("name", "edit", "sentence"), NUMBERS, ids=numbered(NUMBERS))
def test_numbers_that_make_no_weight_are_refused_while_they_are_read(
    name: str, edit: Edit, sentence: str, plain: Path, tmp_path: Path
) -> None:
    edited(plain, tmp_path, name, edit)
    check_files(tmp_path, has_weights=True)
    with pytest.raises(CheckpointError, match=sentence.replace("{}", re.escape(LAYER))):
        load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())


def test_int8_with_zero_points_is_refused_without_them_and_takes_them_in_the_shape_of_its_scales(
    plain: Path, tmp_path: Path
) -> None:
    quantize(plain, tmp_path, "int8-per-channel", GROUP)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantized weight .*_proj has no tensor .*_proj\.weight_zero_point"):
        check_files(tmp_path, has_weights=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [key for key in tensors if key.endswith(".weight_scale")]:
        shape = tensors[name].shape if LAYER in name else tensors[name].flatten().shape
        tensors[name.removesuffix("_scale") + "_zero_point"] = torch.full(shape, 3, dtype=torch.int8)
    save_file(tensors, path)
    numbers = dict(_pieces(tmp_path))
    scale, codes = tensors[f"{LAYER}.weight_scale"], tensors[f"{LAYER}.weight"]
    assert numbers[0].tolist() == ((codes.float() - 3) * scale.float()).tolist()


def _pieces(folder: Path) -> list[tuple[int, Any]]:
    stored = open_checkpoint(folder).tensors()[f"{LAYER}.weight"]
    assert isinstance(stored, QuantizedTensor)
    return [(rows.start, found) for rows, found in stored.pieces()]


def test_groups_that_do_not_divide_a_layer_are_refused_by_its_name(plain: Path, tmp_path: Path) -> None:
    quantize(plain, tmp_path, "gptq-int4", GROUP)
    change_quantization(tmp_path, group_size=40)
    with pytest.raises(
        CheckpointError, match=r"_proj\.qweight holds a weight of \d+ columns, which are no groups of 40"
    ):
        check_files(tmp_path, has_weights=True)


def change_quantization(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "quantization_config": {**raw["quantization_config"], **changes}}))


WEIGHTS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, **changes}}}}


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("int4-packed", {"quant_method": "bitsandbytes"}, "quantization_config is 'bitsandbytes'; supported are compr"),
        ("int4-packed", {"quant_method": None}, "quantization_config is {.*supported are compressed-tensors, fp8"),
        ("int4-packed", {"format": "marlin-24"}, "format in .* is 'marlin-24', and supported are float-quantized"),
        ("int4-packed", {"transform_config": {"R1": {}}}, "transform_config in .*rotates activations"),
        (
            "int4-packed",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config .*only the format 'dense'",
        ),
        (
            "int4-packed",
            {"quantization_status": "calibration"},
            "quantization_status .* is 'calibration', and only 'compressed'",
        ),
        ("int4-packed", {"config_groups": {}}, "config_groups in quantization_config is {}, which must"),
        (
            "int4-packed",
            {"config_groups": {"a": {"weights": None}}},
            r"config_groups\.a .* must be an object with weights",
        ),
        ("int4-packed", {"a_switch_of_tomorrow": 1}, "a_switch_of_tomorrow in .* is 1, which is not understood"),
        ("int4-packed", group(num_bits=3), "with int of 3 bits is not supported"),
        ("int4-packed", group(type="float"), "with float of 4 bits is not supported"),
        ("int4-packed", group(strategy="tensor_group"), "strategy .* is 'tensor_group', and supported are tensor"),
        ("int4-packed", group(group_size=0), "group_size .* is 0, which must be a positive number"),
        ("int4-packed", group(dynamic=True), "dynamic in .* is True, and only false"),
        (
            "int4-packed",
            {"config_groups": {"a": {"targets": ["re:("], "weights": WEIGHTS}}},
            "'re:\\(', which is no pattern, missing",
        ),
        (
            "int4-packed",
            {"config_groups": {"a": {"targets": 3, "weights": WEIGHTS}}},
            "targets .* is 3, which must list",
        ),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt in .* is 'e5m2', and only 'e4m3'"),
        ("fp8-blocks", {"weight_block_size": [128]}, r"weight_block_size .* is \[128\], which must be two positive"),
        ("gptq-int4", {"bits": 3}, "bits in quantization_config is 3, and supported are 4, 8"),
        ("gptq-int4", {"checkpoint_format": "marlin"}, "checkpoint_format .* is 'marlin', and supported are 'gptq'"),
        ("gptq-int4", {"is_marlin_format": True}, "checkpoint_format .* is 'marlin', and supported are 'gptq'"),
        ("gptq-int4", {"pack_dtype": "int16"}, "pack_dtype .* is 'int16', and only 'int32'"),
        ("gptq-int4", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic .* only rules that leave layers out"),
        ("awq-int4", {"version": "gemv"}, "version .* is 'gemv', and only 'gemm'"),
        ("awq-int4", {"zero_point": False}, "zero_point .* is False, and only true"),
        ("awq-int4", {"bits": 8}, "bits .* is 8, and only 4 is supported of AWQ"),
        (
            "fp8-blocks",
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_algo .* is 'NVFP4', and supported are FP8",
        ),
    ],
)
def test_a_scheme_that_is_not_supported_is_refused_by_its_key_with_what_to_do(
    name: str, changes: dict[str, Any], sentence: str, plain: Path, tmp_path: Path
) -> None:
    quantize(plain, tmp_path, name, GROUP)
    change_quantization(tmp_path, **changes)
    for refuses in (lambda: load_config(open_checkpoint(tmp_path)), lambda: check_files(tmp_path, has_weights=True)):
        with pytest.raises(CheckpointError, match=f"(?s){sentence}.*: serve the checkpoint that it was made of"):
            refuses()


def test_modelopt_s_own_file_is_refused_by_its_algorithm(plain: Path, tmp_path: Path) -> None:
    quantize(plain, tmp_path, "modelopt-per-tensor", GROUP)
    for content, sentence in (
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, "quant_algo in .* is 'W4A16_AWQ'"),
        ({"quantization": None}, "quantization in hf_quant_config.json is None"),
    ):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=sentence):
            check_files(tmp_path, has_weights=True)


def test_a_weight_of_another_shape_than_the_configuration_asks_for_is_refused(plain: Path, tmp_path: Path) -> None:
    quantize(plain, tmp_path, "gptq-int4", GROUP)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"\.qweight holds a weight of shape \[.*\]; config\.json asks for \["):
        load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
