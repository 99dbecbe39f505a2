"""One request from text to text: length, admission, prefill in the bubbles, hand-off, decoding, stop strings.

Yields `Delta`s; `api` formats them. Knows the dispatcher, a decode engine and the tokenizer. While the service drains,
admitted requests are finished and new ones refused.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

from atlas.errors import AtlasError
from bubbletea.admit.records import RequestKind
from bubbletea.handoff.decode import FAILED, DecodeEngine
from bubbletea.handoff.kv_store import KEEP_S
from bubbletea.handoff.remote_parts import Ticket, transfer_params
from bubbletea.handoff.sampling import Sampling, choose
from bubbletea.kv_server import KvServer
from bubbletea.prefill.joining import SERVICE
from bubbletea.prefill.shard import Served
from bubbletea.serve.dispatch import Dispatcher
from bubbletea.serve.errors import ApiError, of_hand_back, of_refusal
from bubbletea.serve.metrics import ServiceMetrics
from bubbletea.serve.prefills import HandedBack, Prefilled, Prompt, Refused
from bubbletea.serve.tokens import ServedTokenizer, TextStream

DRAIN_RETRY_S = 5.0
"""Retry-After while the service ends: until another one may have taken its place."""
TOKEN_S, TOKENS_OVER = 0.02, 8
"""Initial estimate of the time per decoded token, and the number of responses in its moving average."""


@dataclass(frozen=True)
class TextRequest:
    """A parsed and validated request."""

    tenant: str
    prompt: str | Sequence[int]
    sampling: Sampling
    stops: Sequence[str] = ()
    shows_stop: bool = False
    """The stop string or stop token is part of the response."""
    kind: RequestKind = "online"
    deadline_s: float | None = None
    hands_off: bool = False
    special: bool = True
    """The tokenizer adds its special tokens; a chat template has added them already."""
    truncate: int | None = None
    """Most tokens of the prompt that are kept; -1: as many as fit."""
    keeps_start: bool = False
    """Of a truncated prompt, keep the start; otherwise the end."""
    cache_salt: str = ""
    arrived_s: float = field(default_factory=time.monotonic)

    @property
    def num_new(self) -> int:
        return self.sampling.max_tokens

    @cached_property
    def key(self) -> bytes:
        """Equal for the same request when it is sent again."""
        what = (self.tenant, self.num_new, self.kind, self.deadline_s, self.hands_off, self.truncate, self.cache_salt)
        prompt = self.prompt if isinstance(self.prompt, str) else repr(list(self.prompt))
        return blake2b(repr(what).encode() + prompt.encode(errors="replace"), digest_size=16).digest()


@dataclass(frozen=True)
class Delta:
    """The next part of a response. The last one has a `finish`."""

    text: str
    num_prompt: int
    num_cached: int
    num_new: int
    """Tokens so far."""
    finish: str | None = None
    handed_off: dict[str, Any] | None = None
    """`kv_transfer_params` for the decode engine."""


class Service:
    def __init__(
        self,
        name: str,
        served: Served,
        text: ServedTokenizer,
        dispatcher: Dispatcher,
        decoder: DecodeEngine | None,
        kv_server: KvServer,
        metrics: ServiceMetrics,
        deadline_s: float,
    ) -> None:
        self.name, self.served, self.text, self.dispatcher = name, served, text, dispatcher
        self.decoder, self.kv_server, self.metrics, self.deadline_s = decoder, kv_server, metrics, deadline_s
        self.draining = False
        self.num_active = 0
        self._token_s = TOKEN_S
        """Measured time per decoded token."""
        self._tokens_over_least = 1.0
        """Of the last prompts: their tokens over the least number that their size allows."""

    async def answer(self, asked: TextRequest) -> AsyncIterator[Delta]:
        """Raises ApiError only before the first Delta."""
        if self.draining:
            raise ApiError(
                503, "the service is shutting down and takes no new requests", code="draining", retry_s=DRAIN_RETRY_S
            )
        self.num_active += 1
        try:
            async for delta in self._answer(asked):
                yield delta
        finally:
            self.num_active -= 1

    async def _answer(self, asked: TextRequest) -> AsyncIterator[Delta]:
        if asked.hands_off:
            self._require_handoff()
        elif self.decoder is None:
            raise ApiError(
                400,
                "this service only prefills (--handoff-only): send the request to a router with vLLM behind it, or "
                'with max_tokens 1 and kv_transfer_params {"do_remote_decode": true}',
                param="kv_transfer_params",
                code="handoff_only",
            )
        tokens = await self._tokens(asked)
        found = await self._prefill(asked, tokens)
        self.metrics.prefilled(found, len(tokens))
        kept = False
        try:
            if asked.hands_off:
                kept = True
                yield self._hand_off(asked, found, tokens)
                return
            async for delta in self._decode(asked, found, tokens):
                yield delta
        finally:
            if not kept:
                self.dispatcher.store.release(found.parcel.ticket)

    # ---- before ------------------------------------------------------------------------------------------------
    def _require_handoff(self) -> None:
        """Every worker listens for decode engines."""
        for member in self.dispatcher.connections.members.values():
            if member.parts is None:
                raise ApiError(
                    503,
                    f"worker {member.name} accepts no decode engines from other hosts without certificates. Start "
                    "training with --certs",
                    code="no_handoff",
                )

    async def _tokens(self, asked: TextRequest) -> list[int]:
        """Refuses by the least possible length first; tokenizes only if that is not enough."""
        is_text = isinstance(asked.prompt, str)
        at_least = self.text.at_least(asked.prompt) if isinstance(asked.prompt, str) else len(asked.prompt)
        kept = self._kept(asked)
        at_least = min(at_least, kept)
        self._require_short(at_least, asked.num_new)
        if asked.kind == "online" and is_text:
            deadline_ns = self._deadline_ns(asked)
            least = Prompt((), asked.tenant, asked.num_new, deadline_ns, key=asked.key)
            likely = min(kept, round(at_least * self._tokens_over_least))
            try:
                self.dispatcher.check(least, max(1, at_least), max(1, likely))
            except Refused as refused:
                raise of_refusal(refused, at_least) from None
        if isinstance(asked.prompt, str):
            encode = partial(self.text.encode, special=asked.special)
            tokens = await asyncio.to_thread(encode, asked.prompt) or [min(self.text.ends, default=0)]
            ratio = len(tokens) / max(1, self.text.at_least(asked.prompt))
            self._tokens_over_least += (ratio - self._tokens_over_least) / TOKENS_OVER
        else:
            tokens = list(asked.prompt)
        if len(tokens) > kept:
            tokens = tokens[:kept] if asked.keeps_start else tokens[-kept:]
        if max(tokens) >= self.served.config.vocabulary:
            what = "the tokenizer's vocabulary is larger than the model's" if is_text else f"token {max(tokens)}"
            raise ApiError(400, f"{what}: the model's vocabulary has {self.served.config.vocabulary}", param="prompt")
        self._require_short(len(tokens), asked.num_new)
        return tokens

    def _kept(self, asked: TextRequest) -> int:
        """The most tokens of a prompt that are kept."""
        if asked.truncate is None:
            return sys.maxsize
        return asked.truncate if asked.truncate > 0 else max(1, self.served.config.max_length - asked.num_new)

    def _require_short(self, num_tokens: int, num_new: int) -> None:
        longest = self.served.config.max_length
        if num_tokens + num_new > longest:
            raise ApiError(
                400,
                f"this model's context is {longest} tokens; the prompt has at least {num_tokens} and {num_new} "
                "are asked for. Shorten one of them",
                param="prompt",
                code="context_length_exceeded",
            )

    def _deadline_ns(self, asked: TextRequest) -> int:
        return int((asked.arrived_s + (asked.deadline_s or self.deadline_s)) * 1e9)

    async def _prefill(self, asked: TextRequest, tokens: list[int]) -> Prefilled:
        deadline_ns = self._deadline_ns(asked) if asked.kind == "online" else None
        try:
            kept_s = KEEP_S if asked.hands_off else asked.num_new * self._token_s
            rest = (deadline_ns, asked.kind, kept_s, asked.cache_salt, asked.hands_off, asked.key)
            prompt = Prompt(tokens, asked.tenant, asked.num_new, *rest)
            return await self.dispatcher.prefill(prompt)
        except Refused as refused:
            raise of_refusal(refused, len(tokens)) from None
        except HandedBack as error:
            raise of_hand_back(error) from None

    # ---- after -------------------------------------------------------------------------------------------------
    def _hand_off(self, asked: TextRequest, found: Prefilled, tokens: list[int]) -> Delta:
        """The first token, and the address of the keys and values."""
        first = choose(found.logits, asked.sampling, asked.sampling.generator(), tokens)
        seconds = time.monotonic() - asked.arrived_s
        self.metrics.first_token_s.observe(seconds)
        self.metrics.answered(seconds, seconds, 1, "length")
        parcel, address = found.parcel, self.kv_server.address
        datacenter = found.parts[0].name.partition("/")[0]
        name = "" if self.kv_server.context is None else f"{datacenter}/{SERVICE}"
        ticket = Ticket(parcel.ticket, *address, parcel.model, parcel.length, found.parts, name)
        params = transfer_params(ticket, self.kv_server.token, tokens)
        return Delta(self.text.decode([first]), len(tokens), found.cached_tokens, 1, "length", params)

    async def _decode(self, asked: TextRequest, found: Prefilled, tokens: list[int]) -> AsyncIterator[Delta]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str | None]]()

        def arrived(token: int, why: str | None) -> None:
            queue.put_nowait((token, why))
            if why is not None:  # now, and not when the client has read everything: it may never do so
                self.dispatcher.store.release(found.parcel.ticket)

        def on_token(token: int, why: str | None) -> None:
            loop.call_soon_threadsafe(arrived, token, why)

        assert self.decoder is not None, "refused before"
        began_s, count = time.monotonic(), 0
        cancel = self.decoder.submit(found.parcel.cache(), tokens, found.logits, asked.sampling, on_token)
        self.metrics.decoding(1)
        try:
            async for delta in self._written(asked, found, len(tokens), queue):
                count = delta.num_new
                yield delta
        finally:
            cancel()
            self.metrics.decoding(-1)
            if count:
                self._token_s += ((time.monotonic() - began_s) / count - self._token_s) / TOKENS_OVER

    async def _written(
        self, asked: TextRequest, found: Prefilled, length: int, queue: asyncio.Queue[tuple[int, str | None]]
    ) -> AsyncIterator[Delta]:
        stream, stops = TextStream(self.text), StopStrings(asked.stops, shown=asked.shows_stop)
        hidden = frozenset[int]() if asked.shows_stop else asked.sampling.stop_tokens
        count, first_s, finish = 0, 0.0, None
        while finish is None:
            token, finish = await queue.get()
            if (token, finish) == FAILED:
                raise RuntimeError("the decode engine failed; see its log")
            count += 1
            if count == 1:
                first_s = time.monotonic() - asked.arrived_s
                self.metrics.first_token_s.observe(first_s)
            fresh = "" if token in hidden else stream.push(token)
            fresh += stream.flush() if finish else ""
            may_stop = count > asked.sampling.min_tokens
            text, stopped = stops.push(fresh, last=finish is not None) if may_stop else (fresh, False)
            finish = "stop" if stopped else finish
            if finish:
                self.metrics.answered(first_s, time.monotonic() - asked.arrived_s, count, finish)
            if text or finish or count == 1:
                yield Delta(text, length, found.cached_tokens, count, finish)


class StopStrings:
    """Ends a text before a stop string; holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """`shown`: the stop string is part of the text."""
        self._stops, self._shown = [stop for stop in stops if stop], shown
        self._held = ""

    def push(self, text: str, *, last: bool) -> tuple[str, bool]:
        """The text that can be shown, and whether a stop string was found."""
        self._held += text
        found = [(at, at + len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            start, end = min(found)
            shown, self._held = self._held[: end if self._shown else start], ""
            return shown, True
        keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def chat_prompt(text: ServedTokenizer, messages: Sequence[dict[str, str]], *, add_generation: bool = True) -> str:
    try:
        return text.chat(messages, add_generation=add_generation)
    except AtlasError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from None
