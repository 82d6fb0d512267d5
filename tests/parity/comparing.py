"""What must hold for one answer, and for the same request's answers from two services."""

from __future__ import annotations

from tests.parity.client import Answer, Scored
from tests.parity.structures import nothing_was_left
from tests.parity.workload import Asked

NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def compare(asked: Asked, expected: Answer, other: Answer, where: str) -> None:
    """The same answer; of a request that was cut short, one answer is the beginning of the other."""
    for answer in (expected, other):
        check(asked, answer, where)
    if asked.is_cut:
        for name in ("tokens", "logprobs", "prompt_tokens", "prompt_logprobs", "text"):
            ours, theirs = getattr(expected, name), getattr(other, name)
            if name == "text":  # one may have been cut inside a character, and says so
                ours, theirs = ours.rstrip(NO_CHARACTER), theirs.rstrip(NO_CHARACTER)
            common = min(len(ours), len(theirs))
            assert theirs[:common] == ours[:common], f"{where}: {name}"
        return
    for name in ("tokens", "logprobs", "prompt_tokens", "prompt_logprobs", "text", "reason", "stop"):
        assert getattr(other, name) == getattr(expected, name), f"{where}: {name}"
    assert other.completion_tokens == expected.completion_tokens, where


def check(asked: Asked, answer: Answer, where: str) -> None:
    """One terminal, nothing after it, no failure, and everything that was asked for."""
    sampling, output = asked.request.sampling, asked.request.output
    assert answer.terminals == (0 if answer.cancelled else 1), f"{where}: {answer.terminals} terminals"
    assert answer.after_terminal == 0, f"{where}: something followed the terminal"
    left_with_none = nothing_was_left(asked.request, answer.reason)
    assert left_with_none or not answer.reason.startswith("status"), f"{where}: {answer.reason}"
    if output.HasField("logprobs"):
        assert len(answer.logprobs) == len(answer.tokens), f"{where}: a token without its log-probability"
        check_tops(answer.logprobs, output.logprobs, where)
    else:
        assert not answer.logprobs, f"{where}: log-probabilities that nobody asked for"
    if not output.HasField("prompt_logprobs"):
        assert all(scored == (None, ()) for scored in answer.prompt_logprobs), where
    elif answer.prompt_logprobs:
        assert answer.prompt_logprobs[0] == (None, ()), f"{where}: the first token of a prompt has no probability"
        check_tops(answer.prompt_logprobs[1:], output.prompt_logprobs, where)
    if not (answer.cancelled or left_with_none or answer.reason == "ABORTED"):
        whole = answer.prompt_length if output.echo or output.HasField("prompt_logprobs") else 0
        assert len(answer.prompt_tokens) == whole, f"{where}: {len(answer.prompt_tokens)} prompt tokens of {whole}"
        assert not sampling.HasField("seed") or answer.seed == sampling.seed, f"{where}: another seed"
        ids = list(asked.request.token_ids.ids)
        assert not ids or answer.prompt_tokens in ([], ids), f"{where}: another prompt came back"


def check_tops(scores: list[Scored], top: int, where: str) -> None:
    """Every token has its log-probability and those of the `top` most likely ones, in order."""
    for logprob, tops in scores:
        assert logprob is not None and logprob <= 0, where
        assert len(tops) == top, where
        assert [score for _, score in tops] == sorted((score for _, score in tops), reverse=True), where
