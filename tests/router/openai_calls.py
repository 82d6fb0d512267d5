"""Calls of the OpenAI client, each with its answer as JSON: `openai_calls.py URL KEY`, in the router's environment.

It knows nothing of this repository, as a client does.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any, Final

MODEL: Final = "bundled"
PROMPT: Final = "def f(x):\n"
SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
EBNF: Final = 'root ::= "yes" | "no" root'
TOOLS: Final = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]
NAMED: Final = {"type": "function", "function": {"name": "get"}}
USAGE: Final = {"include_usage": True}


def schema_of(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


class Calls:
    """Every call by its name. client: of the package `openai`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.all: dict[str, Callable[[], Any]] = {
            "models": lambda: [model.id for model in client.models.list()],
            "completion": lambda: self.completion(),
            "completion streamed": lambda: self.streamed(self.completion(stream=True, stream_options=USAGE)),
            "chat": lambda: self.chat(),
            "chat streamed": lambda: self.streamed(self.chat(stream=True, stream_options=USAGE)),
            "seed": lambda: [self.text(seed=7, temperature=1.0) for _ in range(2)],
            "greedy": lambda: [self.text(temperature=0.0) for _ in range(2)],
            "stop": lambda: self.completion(stop=["(", ":", "."], max_tokens=200),
            "logprobs of a chat": lambda: self.chat(logprobs=True, top_logprobs=2),
            "logprobs of a completion": lambda: self.completion(logprobs=2),
            "json_schema": lambda: self.chat(response_format=schema_of(SCHEMA), max_tokens=600),
            "json_object": lambda: self.chat(response_format={"type": "json_object"}, max_tokens=1500),
            "regex": lambda: self.chat(extra_body={"regex": "a{3}b"}),
            "ebnf": lambda: self.chat(extra_body={"ebnf": EBNF}, max_tokens=200),
            "named tool": lambda: self.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=600),
            "required tool": lambda: self.chat(tools=TOOLS, tool_choice="required", max_tokens=1500),
            "prompt list": lambda: self.completion(prompt=[PROMPT, "import "], max_tokens=4),
            "several completions": lambda: [
                self.completion(n=2, seed=7, temperature=1.0),
                *(self.text(seed=seed, temperature=1.0) for seed in (7, 8)),
            ],
            "several chats": lambda: [self.chat(n=2, seed=7), self.indexes(self.chat(n=2, seed=7, stream=True))],
            "prompt of ids": lambda: self.completion(prompt=[5, 6, 7]),
            "echo": lambda: self.completion(echo=True, max_tokens=4),
            "echo with logprobs": lambda: self.completion(echo=True, logprobs=1, max_tokens=4),
            "suffix": lambda: self.completion(suffix="SUFFIX", max_tokens=4),
            "best_of": lambda: self.completion(best_of=2, max_tokens=4),
            "logit_bias": lambda: self.text(temperature=0.0, max_tokens=1, logit_bias={"5": 100}),
            "usage of a prefix that is cached": lambda: [
                self.completion(prompt=PROMPT * 40)["usage"] for _ in range(3)
            ],
            "disconnect": self.disconnect,
            "no tokens": lambda: self.completion(max_tokens=0),
            "too long": lambda: self.completion(prompt="x " * 5000),
            "more than a caller may have": lambda: self.completion(n=16),
            "temperature below 0": lambda: self.completion(temperature=-1.0),
            "top_p above 1": lambda: self.completion(top_p=1.5),
            "broken regex": lambda: self.chat(extra_body={"regex": "(a"}),
            "broken ebnf": lambda: self.chat(extra_body={"ebnf": "root = a"}),
            "schema that is not enforced": lambda: self.chat(response_format=schema_of({"not": {}})),
            "unknown model": lambda: client.completions.create(model="other", prompt=PROMPT).model_dump(),
            "embeddings": lambda: client.embeddings.create(model=MODEL, input="a").model_dump(),
        }

    def completion(self, prompt: object = PROMPT, max_tokens: int = 12, seed: int = 1, **more: Any) -> Any:
        made = self._client.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, seed=seed, **more)
        return self._plain(made, more)

    def chat(self, max_tokens: int = 12, seed: int = 1, **more: Any) -> Any:
        said = [{"role": "user", "content": PROMPT}]
        made = self._client.chat.completions.create(
            model=MODEL, messages=said, max_tokens=max_tokens, seed=seed, **more
        )
        return self._plain(made, more)

    def text(self, **more: Any) -> str:
        return str(self.completion(**more)["choices"][0]["text"])

    def streamed(self, stream: Any) -> dict[str, Any]:
        chunks = [chunk.model_dump() for chunk in stream]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [choice["text"] if "text" in choice else choice["delta"]["content"] or "" for choice in choices]
        return {"texts": texts, "finish": choices[-1]["finish_reason"], "usage": chunks[-1]["usage"]}

    def indexes(self, stream: Any) -> dict[int, str]:
        """The text of each choice, by its index."""
        texts: dict[int, str] = {}
        for choice in (choice for chunk in stream for choice in chunk.model_dump()["choices"]):
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"]["content"] or "")
        return texts

    def disconnect(self) -> int:
        stream = self.completion(stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
        seen = sum(1 for _ in zip(range(5), stream, strict=False))
        stream.close()
        return seen

    def _plain(self, made: Any, more: dict[str, Any]) -> Any:
        return made if more.get("stream") else made.model_dump()


def answers(url: str, key: str, names: list[str]) -> dict[str, Any]:
    """By the call's name: its answer, or the status and the message of its refusal. names: of calls, none for all."""
    openai = importlib.import_module("openai")
    calls = Calls(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)).all
    found: dict[str, Any] = {}
    for name in names or calls:
        try:
            found[name] = {"answer": calls[name]()}
        except openai.APIStatusError as error:
            found[name] = {"status": error.status_code, "message": str(error)}
    return found


if __name__ == "__main__":
    print(json.dumps(answers(sys.argv[1], sys.argv[2], sys.argv[3:])))
