"""Small tokenizers of both kinds that the service supports."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

END_ID = 256


def byte_level_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the byte-level alphabet, 256 is special, from 257 on tokens of several characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token_id for token_id, character in enumerate(alphabet)}
    vocabulary["<|end|>"] = END_ID
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("a", "b"), ("ab", "ab"), ("Ã", "©")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def panicking_tokenizer() -> Tokenizer:
    """One that panics on a text of 40 `a`: its expression backtracks until the library gives up."""
    tokenizer = byte_level_tokenizer()
    split = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """The kind that Llama 2 has: words with ▁, bytes as <0xNN>."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁hello",
        "▁world",
        "a",
        "b",
        "é",
    ]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    return tokenizer
