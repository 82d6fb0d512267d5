"""Messages for missing checkpoint files: what is there instead, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from runahead.runtime.checkpoint.errors import CheckpointError

GGUF: Final = ".gguf"
_ADAPTER: Final = "adapter_config.json"
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_GGUF_VERSIONS: Final = (2, 3)
_LFS_POINTER: Final = b"version https://git-lfs"
_MOST_NAMED: Final = 5

FETCH: Final = "fetch it with `hf download ORG/NAME --local-dir FOLDER`"
AGAIN: Final = "fetch the file again, for instance with `hf download ORG/NAME --local-dir FOLDER`"
UNQUANTIZED: Final = (
    "serve the checkpoint that it was made of, as its model card names it, or a GGUF file of the same model"
)


def of_folder(folder: Path) -> CheckpointError:
    """Explain a folder without `config.json`."""
    names = _names(folder)
    ggufs = [name for name in names if name.lower().endswith(GGUF)]
    if _ADAPTER in names:
        return CheckpointError(f"{folder} is a LoRA adapter and no model: {_merge_adapter(folder)}")
    if ggufs:
        return CheckpointError(f"{folder} is no checkpoint: it has no config.json; {_one_of(folder, ggufs)}")
    if "params.json" in names:
        return CheckpointError(
            f"{folder} has params.json in place of config.json: it is in its maker's own layout; {FETCH}, from a "
            "repository that has config.json and model.safetensors"
        )
    if inner := _checkpoints_below(folder):
        others = f", or {_some(map(str, inner[1:]))}" if inner[1:] else ""
        return CheckpointError(
            f"{folder} is no checkpoint: it has no config.json, but folders below it have; name the one to serve: "
            f"`--model {inner[0]}`{others}"
        )
    return CheckpointError(f"{folder} is no checkpoint: it has no config.json; {FETCH}")


def of_missing_weights(folder: Path) -> CheckpointError:
    """Explain a folder with `config.json` but without `model.safetensors` or its index."""
    begin = f"{folder} has neither model.safetensors nor model.safetensors.index.json"
    names = _names(folder)
    if pickles := [name for name in names if name.endswith(_PICKLES) and name != "training_args.bin"]:
        return CheckpointError(
            f"{begin}, and {_some(pickles)} can't be served: such a file may run code when it is read; "
            + _convert(folder)
        )
    if _ADAPTER in names:
        return CheckpointError(f"{begin}, but a LoRA adapter: {_merge_adapter(folder)}")
    if ggufs := [name for name in names if name.lower().endswith(GGUF)]:
        return CheckpointError(f"{begin}; {_one_of(folder, ggufs)}")
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return CheckpointError(
            f"{begin}, and {_some(shards)} alone do not say what belongs together; fetch what is missing with "
            f"`hf download ORG/NAME --local-dir {folder}`"
        )
    return CheckpointError(f"{begin}; {FETCH}")


def of_head(folder: Path) -> CheckpointError:
    """Explain a draft head's folder without `config.json`, or without `model.safetensors` and `pytorch_model.bin`."""
    names = _names(folder) if folder.is_dir() else []
    pickles = [name for name in names if name.endswith(_PICKLES) and name != "training_args.bin"]
    begin = f"the draft head {folder} is no folder with config.json and model.safetensors or pytorch_model.bin"
    if not pickles or "config.json" not in names:
        return CheckpointError(begin)
    return CheckpointError(
        f"{begin}, and {_some(pickles)} can't be served: such a file may run code when it is read; "
        f"{making_safetensors(folder / pickles[0])}"
    )


def making_safetensors(pickle: Path) -> str:
    """Say how to convert a trusted draft head's file to safetensors."""
    read = f"torch.load('{pickle}', map_location='cpu', weights_only=True)"
    return (
        f'where you trust it, `python -c "import torch, safetensors.torch as s; w = {read}; s.save_file('
        "{k: v.contiguous() for k, v in w.items()}, "
        f"'{pickle.parent / 'model.safetensors'}')\"` makes safetensors of it"
    )


def of_missing_tokenizer(folder: Path) -> CheckpointError:
    """Explain a folder without `tokenizer.json`."""
    begin = f"{folder / 'tokenizer.json'} is missing: a checkpoint needs its tokenizer beside it"
    names = set(_names(folder))
    made_of = [name for name in ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json") if name in names]
    if made_of:
        return CheckpointError(
            f'{begin}, and has {" and ".join(made_of)}, which is another format; `python -c "from transformers '
            f"import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\"` "
            "(pip install transformers sentencepiece) makes tokenizer.json of it"
        )
    return CheckpointError(
        f'{begin}; `python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('FROM').save_pretrained('{folder}')\"` (pip install transformers) puts FROM's there"
    )


def of_file(path: Path) -> CheckpointError:
    """Explain a path that is neither a folder nor ends in `.gguf`."""
    if not path.exists():
        return CheckpointError(f"{path} is not there: give a folder with config.json, or a .gguf file")
    if path.suffix == ".safetensors":
        return CheckpointError(
            f"{path} alone is no checkpoint: give the folder that it is in, `--model {path.parent}`, which needs "
            "config.json and tokenizer.json too"
        )
    if path.suffix in _PICKLES:
        return CheckpointError(
            f"{path} can't be served: such a file may run code when it is read; {_convert(path.parent)}"
        )
    return CheckpointError(f"{path} is no checkpoint: give a folder with config.json, or a .gguf file")


def refuse_no_gguf(path: Path) -> None:
    """Raise CheckpointError for a file that does not begin like a supported GGUF file."""
    try:
        with path.open("rb") as file:
            begin = file.read(24)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    refuse_lfs_pointer(path, begin)
    if begin[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin like one; {AGAIN}")
    version = int.from_bytes(begin[4:8], "little")
    if version not in _GGUF_VERSIONS:
        if int.from_bytes(begin[4:8], "big") in _GGUF_VERSIONS:
            raise CheckpointError(
                f"{path} is written for big-endian machines: `gguf-convert-endian {path.name} little` turns it round"
            )
        raise CheckpointError(
            f"{path} is GGUF of version {version}; supported are 2 and 3: fetch a newer file of the same model"
        )


def refuse_lfs_pointer(path: Path, begin: bytes) -> None:
    """Raise CheckpointError if the file is a pointer of Git LFS."""
    if begin.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer and not the file itself: `git lfs pull` in {path.parent} fetches it"
        )


def of_split_gguf(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is one part of a GGUF that is split in several files: "
        "`llama-gguf-split --merge FIRST-PART WHOLE.gguf` of llama.cpp makes one file of them"
    )


def _one_of(folder: Path, ggufs: list[str]) -> str:
    if any(_PART.search(name) for name in ggufs):
        return str(of_split_gguf(folder / ggufs[0]))
    if len(ggufs) == 1:
        return f"serve the file that is in it with `--model {folder / ggufs[0]}`"
    return (
        f"it holds {len(ggufs)} GGUF files; name the one to serve: `--model {folder / ggufs[0]}`, or {_some(ggufs[1:])}"
    )


def _checkpoints_below(folder: Path) -> list[Path]:
    """Return folders with `config.json` in a folder of several checkpoints or in Hugging Face's cache of a
    repository.
    """
    return sorted(path.parent for inner in ("*", "snapshots/*") for path in folder.glob(f"{inner}/config.json"))


def _convert(folder: Path) -> str:
    given = f"from_pretrained('{folder}').save_pretrained('TO')"
    return (
        '`python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f'M.{given}; T.{given}"` (pip install transformers torch) makes safetensors of it, in the folder TO'
    )


def _merge_adapter(folder: Path) -> str:
    return (
        '`python -c "from peft import AutoPeftModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').merge_and_unload().save_pretrained('TO')\"` (pip install peft) merges it into "
        "its base model; copy the base model's tokenizer files beside it"
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} can't be looked into: {error.strerror}") from error


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
