"""Reads quantized weights from a checkpoint's files, number by number, as each format defines them.

It is the oracle of `runtime/checkpoint/quantized` and shares no code with it. Every number is computed in float64 and
rounded once, to float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

Floats = NDArray[np.float64]


def e4m3(code: int) -> float:
    """FP8 e4m3 as its definition has it: (-1)^s * 2^(e - 7) * 1.m, or of e = 0 (-1)^s * 2^-6 * 0.m."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 0b1111, code & 0b111
    if (exponent, mantissa) == (0b1111, 0b111):
        return float("nan")
    size = 2.0**-6 * (mantissa / 8) if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return -size if sign else size


def nibble(word: int, place: int, bits: int) -> int:
    return (word & 0xFFFFFFFF) >> (place * bits) & (1 << bits) - 1


def dequantize_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint under the name that it has without quantization, float32."""
    config = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if config is None:
        config = json.loads((folder / "hf_quant_config.json").read_text())["quantization"] | {
            "quant_method": "modelopt"
        }
    stored = load_file(folder / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(".weight_packed"):
            made = _compressed(stored, name.removesuffix(".weight_packed"), config)
        elif name.endswith(".qweight"):
            read = _awq if config["quant_method"] == "awq" else _gptq
            made = read(stored, name.removesuffix(".qweight"), config)
        elif tensor.dtype in (torch.float8_e4m3fn, torch.int8) and "zero" not in name:
            made = _bytes(stored, name, config)
        elif "scale" in name or "zero" in name or name.endswith(("weight_shape", "g_idx", ".qzeros")):
            continue
        else:
            found[name] = tensor.float()
            continue
        own = name if not name.endswith((".weight_packed", ".qweight")) else name.rpartition(".")[0] + ".weight"
        found[own] = torch.from_numpy(made.astype(np.float32))
    return found


def _bytes(stored: dict[str, torch.Tensor], name: str, config: dict[str, Any]) -> Floats:
    weight = stored[name]
    scale = stored[name + ("_scale_inv" if f"{name}_scale_inv" in stored else "_scale")].double().numpy()
    if weight.dtype == torch.int8:
        numbers = weight.double().numpy()
    else:
        table = np.array([e4m3(code) for code in range(256)])
        numbers = table[weight.view(torch.uint8).numpy()]
    if weight.ndim == 3:
        return np.stack([_in_blocks(one, of) for one, of in zip(numbers, scale, strict=True)])
    return _in_blocks(numbers, scale)


def _in_blocks(numbers: Floats, scale: Floats) -> Floats:
    """Blocks of 128 x 128, or rows, or all of it, by how many scales there are."""
    rows, columns = numbers.shape
    made = np.empty_like(numbers)
    for row in range(rows):
        for column in range(columns):
            if scale.size == 1:
                factor = scale.flat[0]
            elif scale.size == rows:
                factor = scale.flat[row]
            else:
                factor = scale[row // 128, column // 128]
            made[row, column] = numbers[row, column] * factor
    return made


def _compressed(stored: dict[str, torch.Tensor], module: str, config: dict[str, Any]) -> Floats:
    weights = config["config_groups"]["group_0"]["weights"]
    bits, group = weights["num_bits"], weights["group_size"]
    rows, columns = stored[f"{module}.weight_shape"].tolist()
    words, scale = stored[f"{module}.weight_packed"].tolist(), stored[f"{module}.weight_scale"].double().numpy()
    zeros = stored[f"{module}.weight_zero_point"].tolist() if not weights["symmetric"] else None
    order = stored[f"{module}.weight_g_idx"].tolist() if weights.get("actorder") == "group" else None
    each, half = 32 // bits, 2 ** (bits - 1)
    made = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            of = column // group if order is None else order[column]
            number = nibble(words[row][column // each], column % each, bits) - half
            zero = 0 if zeros is None else nibble(zeros[row // each][of], row % each, bits) - half
            made[row, column] = (number - zero) * scale[row, of]
    return made


def _gptq(stored: dict[str, torch.Tensor], module: str, config: dict[str, Any]) -> Floats:
    bits = config["bits"]
    words, zeros = stored[f"{module}.qweight"].tolist(), stored[f"{module}.qzeros"].tolist()
    scale, order = stored[f"{module}.scales"].double().numpy(), stored[f"{module}.g_idx"].tolist()
    each, rows, columns = 32 // bits, scale.shape[1], len(order)
    one = 1 if config["checkpoint_format"] == "gptq" else 0
    made = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            of = order[column]
            zero = nibble(zeros[of][row // each], row % each, bits) + one & (1 << bits) - 1
            made[row, column] = (nibble(words[column // each][row], column % each, bits) - zero) * scale[of, row]
    return made


def _awq(stored: dict[str, torch.Tensor], module: str, config: dict[str, Any]) -> Floats:
    words, zeros = stored[f"{module}.qweight"].tolist(), stored[f"{module}.qzeros"].tolist()
    scale = stored[f"{module}.scales"].double().numpy()
    rows, columns = scale.shape[1], len(words)
    place = {column: at for at, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7))}
    made = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            of, at = column // config["group_size"], place[row % 8]
            zero = nibble(zeros[of][row // 8], at, 4)
            made[row, column] = (nibble(words[column][row // 8], at, 4) - zero) * scale[of, row]
    return made
