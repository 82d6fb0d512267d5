"""The tokenizer of a checkpoint folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders

from runahead.runtime.checkpoint.folder import FolderCheckpoint
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.text.tokenizer import TextTokenizer, load_tokenizer
from tests.service.small_tokenizers import END_ID, byte_level_tokenizer


def checkpoint(folder: Path, **config: object) -> Path:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_folder_without_a_tokenizer_is_refused_by_the_files_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        load_tokenizer(FolderCheckpoint(tmp_path))


def test_a_kind_that_is_not_supported_is_refused_with_the_way_out(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"decoder \(WordPiece\) is not supported.*; --tokenizer none serves it"):
        load_tokenizer(FolderCheckpoint(tmp_path))


def test_a_broken_tokenizer_is_refused_by_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the tokenizer of .* is not readable"):
        load_tokenizer(FolderCheckpoint(tmp_path))


def test_a_tokenizer_on_which_the_library_panics_is_refused_by_the_files_name(tmp_path: Path) -> None:
    vocab, prefix = {"a": 0, "b": 1, "ab": 2}, "##"  # the library removes it even from tokens that lack it, and panics
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "continuing_subword_prefix": prefix}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the tokenizer of .* is not readable"):
        load_tokenizer(FolderCheckpoint(tmp_path))


def test_truncation_and_padding_saved_with_a_tokenizer_change_no_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(FolderCheckpoint(tmp_path))
    assert len(asyncio.run(loaded.encode("xyz"))) == 3
    asyncio.run(loaded.close())


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", {"default": "plain"}),
        (
            [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}, {"name": 1}, "x"],
            {"tool_use": "t", "default": "d"},
        ),
        (None, {}),
    ],
)
def test_the_chat_templates_are_texts_by_their_names(
    tmp_path: Path, template: object, expected: dict[str, str]
) -> None:
    loaded = load_tokenizer(FolderCheckpoint(checkpoint(tmp_path, chat_template=template)))
    assert loaded.chat_templates == expected
    asyncio.run(loaded.close())


def test_tokens_that_a_template_asks_for_are_texts_whether_they_are_written_so_or_as_objects(tmp_path: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    loaded = load_tokenizer(FolderCheckpoint(checkpoint(tmp_path, **tokens)))
    assert loaded.template_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    asyncio.run(loaded.close())


def test_a_template_of_its_own_file_wins(tmp_path: Path) -> None:
    (checkpoint(tmp_path, chat_template="other") / "chat_template.jinja").write_text("own", encoding="utf-8")
    loaded = load_tokenizer(FolderCheckpoint(tmp_path))
    assert loaded.chat_templates == {"default": "own"}
    asyncio.run(loaded.close())
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("more", encoding="utf-8")
    assert FolderCheckpoint(tmp_path).chat_templates() == {"default": "own", "tool_use": "more"}
    loaded = load_tokenizer(FolderCheckpoint(tmp_path), "given")
    assert loaded.chat_templates == {"default": "given"}
    asyncio.run(loaded.close())


def test_the_tokens_of_the_chat_template_are_texts_by_name(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "<|end|>", "special": True}, "pad_token": None}
    loaded = load_tokenizer(FolderCheckpoint(checkpoint(tmp_path, **config, add_bos_token=True, model_max_length=8)))
    assert loaded.template_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    asyncio.run(loaded.close())


def test_special_tokens_are_listed_and_recognised_in_text() -> None:
    tokenizer = TextTokenizer(byte_level_tokenizer())
    assert tokenizer.special_tokens == {END_ID: "<|end|>"}
    assert asyncio.run(tokenizer.encode("<|end|>")).tolist() == [END_ID]
    assert asyncio.run(tokenizer.decode([END_ID])) == ""
    assert asyncio.run(tokenizer.decode([END_ID], include_special_tokens=True)) == "<|end|>"
    asyncio.run(tokenizer.close())


def test_an_added_token_with_an_accent_comes_back_as_its_content() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("naïve", normalized=False)])
    text = TextTokenizer(tokenizer)
    ids = asyncio.run(text.encode("a naïve é")).tolist()
    assert asyncio.run(text.decode([*ids, END_ID])) == "a naïve é"
    assert asyncio.run(text.decode([*ids, END_ID], include_special_tokens=True)) == "a naïve é<|end|>"
    asyncio.run(text.close())


def test_a_long_text_is_tokenized_beside_the_event_loop() -> None:
    async def turns_while(tokenizer: TextTokenizer) -> tuple[int, int]:
        task, turns = asyncio.ensure_future(tokenizer.encode("hello " * 20_000)), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return len(task.result()), turns

    tokenizer = TextTokenizer(byte_level_tokenizer())
    tokens, turns = asyncio.run(turns_while(tokenizer))
    assert tokens == 3 * 20_000
    assert turns > 10
    asyncio.run(tokenizer.close())


@pytest.mark.parametrize("token_id", [1 << 22, 1 << 28, (1 << 32) - 1])
def test_ids_beyond_any_vocabulary_take_no_memory(tmp_path: Path, token_id: int) -> None:
    description = json.loads(byte_level_tokenizer().to_str())
    description["model"]["vocab"]["<far>"] = token_id
    description["added_tokens"].append({**description["added_tokens"][0], "id": token_id, "content": "<far>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    table = load_tokenizer(FolderCheckpoint(tmp_path)).token_bytes
    assert len(table.spelled) == byte_level_tokenizer().get_vocab_size()
    assert table.of(token_id) == b""
