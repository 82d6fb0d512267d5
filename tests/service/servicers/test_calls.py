"""Stats, GetModelInfo, Tokenize and Detokenize."""

from __future__ import annotations

import pytest

from runahead.runtime.wire.figures import BOUNDS_S
from runahead.service.contract.limits import LIMITS
from runahead.service.structures.structures import Structures
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import DetokenizeRequest, GenerateRequest, GetModelInfoRequest, StatsRequest, TokenizeRequest
from tests.service.fake_engine import INFO, STATS, TIMEOUT_S
from tests.service.running_service import Service
from tests.service.small_tokenizers import END_ID, byte_level_tokenizer


def test_stats_has_the_engines_figures_and_the_front_ends(service: Service) -> None:
    call = service.stub.Generate(GenerateRequest(text="once"), timeout=TIMEOUT_S)
    next(call)
    stats = service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats
    assert stats.uptime_s == STATS.uptime_s
    assert (stats.requests.waiting, stats.requests.running, dict(stats.requests.finished)) == (1, 2, {"LENGTH": 3})
    assert (stats.tokens.prompt, stats.tokens.generated, stats.tokens.void_rows) == (70, 80, 9)
    assert (stats.blocks.free, stats.blocks.owned, stats.blocks.fenced) == (40, 20, 3)
    assert dict(stats.chain.launches_by_depth) == {1: 10, 2: 90}
    assert stats.chain.overlap_ratio == STATS.overlap_ratio
    assert (stats.requests.paused, stats.tokens.cached, stats.tokens.recomputed) == (1, 48, 32)
    assert (stats.blocks.reserved, stats.blocks.adopted, stats.blocks.returned) == (15, 12, 3)
    assert (stats.penalty_slots.total, stats.penalty_slots.free, stats.penalty_slots.fenced) == (16, 13, 1)
    admitted = stats.lifecycle.events["admitted"]
    assert (admitted.count, admitted.held, admitted.idle) == (5, 4, 1)
    assert set(stats.lifecycle.events) == {"admitted", "paused"}
    assert dict(stats.lifecycle.aborted) == {"WAITING": 1, "DECODE": 2}
    assert (stats.barriers["shutdown"].count, stats.barriers["shutdown"].seconds) == (1, 0.125)
    assert dict(stats.graphs.fallbacks) == {"host_device": 100}
    assert stats.first_token_s.p99 == BOUNDS_S[-1], "above every bound"
    first, inter = stats.first_token_histogram, stats.inter_token_histogram
    assert list(first.bounds_s) == list(inter.bounds_s) == list(BOUNDS_S)
    assert list(first.counts) == STATS.first_token.counts
    assert (first.count, first.sum_s, inter.count, inter.sum_s) == (3, 2500.5, 0, 0.0)
    assert not stats.inter_token_s.HasField("p50"), "no figure is not zero"
    assert stats.front_end.open_streams == 1


def test_what_is_looked_at_now_and_then_is_served_as_of_the_last_look(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.engine.auto_accept = False
    call = service.stub.Generate(GenerateRequest(text="once"), timeout=TIMEOUT_S)
    handle = service.engine.next_submit().handle
    service.engine.output(handle, [1, 2, 3])  # its call waits for more than tokens
    monkeypatch.setattr(TextTokenizer, "waiting", 7)
    monkeypatch.setattr(Structures, "waiting", 5)
    while not (stats := service.stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.front_end).unread_bytes:
        service.call(service.front_end.servicer.take_stock)
    assert (stats.unread_bytes, stats.waiting_texts, stats.waiting_structures) == (3 * 48, 7, 5)
    call.cancel()


def test_model_info_says_what_is_served_and_what_the_limits_are(service: Service) -> None:
    info = service.stub.GetModelInfo(GetModelInfoRequest(), timeout=TIMEOUT_S)
    assert (info.model, info.vocab_size, info.context_length) == ("fake", INFO.vocab_size, INFO.context_length)
    assert list(info.eos_token_ids) == [256]
    assert not info.HasField("bos_token_id")
    assert [(special.id, special.content) for special in info.special_tokens] == [(END_ID, "<|end|>")]
    assert info.chat_template == "{{ messages }}"
    assert dict(info.template_tokens) == {"eos_token": "<|end|>"}
    assert info.has_tokenizer
    assert info.limits.stop_strings == LIMITS.stop_strings
    assert info.limits.prompt_tokens == INFO.context_length - 1
    assert info.limits.top_logprobs == LIMITS.top_logprobs == 20
    assert info.limits.queue == INFO.max_queue
    assert info.limits.unread_prompt_bytes == LIMITS.unread_prompt_bytes
    assert info.limits.once_prompt_bytes == LIMITS.once_prompt_bytes
    assert (info.engine.device, info.engine.run_ahead) == ("cpu", 2)
    assert (info.engine.penalty_slots, info.engine.prefix_cache) == (INFO.penalty_slots, True) == (4, True)
    exactness = info.engine.exactness
    assert (exactness.exact, exactness.why, exactness.HasField("largest_ratio")) == (True, "it costs little", False)
    prompts = info.engine.prompt_launches
    assert (prompts.chunk_tokens, prompts.launch_tokens, prompts.queued_tokens) == (32, 64, 96)
    assert prompts.why == "it is small"
    assert info.server_id == "server-1"
    kinds = [(kind.count, kind.mixer, kind.window, kind.feed_forward) for kind in info.layers]
    assert kinds == [(2, "attention", 24, "dense"), (3, "attention", 0, "experts"), (1, "mamba2", 0, "dense")]
    assert [kind.HasField("experts") for kind in info.layers] == [False, True, False]
    experts = info.layers[1].experts
    assert (experts.count, experts.per_token, experts.shared) == (8, 2, 1)
    assert (list(info.drafters), info.engine.drafter) == (["ngram"], "none")
    weights = [(found.stored_as, found.held_as, found.tensors) for found in info.weights]
    assert weights == [("fp8 per-channel", "float32", 21), ("BF16", "float32", 3)]
    assert [(found.parameters, found.stored_bytes) for found in info.weights] == [(400, 500), (40, 80)]


def test_tokenize_and_detokenize_are_each_others_reverse(service: Service) -> None:
    text = "hello 🙂 é<|end|>"
    ids = list(service.stub.Tokenize(TokenizeRequest(text=text), timeout=TIMEOUT_S).token_ids)
    assert ids == byte_level_tokenizer().encode(text).ids
    request = DetokenizeRequest(token_ids=ids, include_special_tokens=True)
    assert service.stub.Detokenize(request, timeout=TIMEOUT_S).text == text
    request = DetokenizeRequest(token_ids=ids)
    assert service.stub.Detokenize(request, timeout=TIMEOUT_S).text == "hello 🙂 é"


def test_an_id_without_a_token_has_no_text(service: Service) -> None:
    assert service.stub.Detokenize(DetokenizeRequest(token_ids=[299]), timeout=TIMEOUT_S).text == ""
