"""The metrics of `/metrics`: vLLM's names where they exist (`vllm:`), others for bubbles and admission (`bubbletea:`).

One registry per service, so that several can run in one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

if TYPE_CHECKING:
    from bubbletea.serve.dispatch import Dispatcher
    from bubbletea.serve.prefills import Prefilled

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Upper bounds of the buckets of histograms, of times and of numbers of tokens."""
FINISHES, REFUSALS = ("stop", "length"), ("deadline", "share", "memory", "too-long", "no-lane", "overcommitted")
RETRIES = ("admitted", "refused")
RECENT = 512
"""Number of waits in the fill ratio."""


class ServiceMetrics:
    def __init__(self, model: str) -> None:
        self.registry, self._model = CollectorRegistry(), model
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)
        self._num_decoding = 0
        self.first_token_s = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token", SECONDS)
        self.between_s = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens", SECONDS)
        self.whole_s = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to the last token", SECONDS)
        self.queued_s = self._histogram("vllm:request_queue_time_seconds", "Arrival to first slice done", SECONDS)
        self.prefill_s = self._histogram("vllm:request_prefill_time_seconds", "First slice to KV delivered", SECONDS)
        self.decode_s = self._histogram("vllm:request_decode_time_seconds", "First token to the last", SECONDS)
        self.prompt_size = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self.answer_size = self._histogram("vllm:request_generation_tokens", "Tokens of an answer", TOKENS)
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens prefilled")
        self.answer_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self.success = self._counters("vllm:request_success", "Answers completed", "finished_reason", FINISHES)
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._hits = self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache")
        self._running = self._gauge("vllm:num_requests_running", "Requests being prefilled or decoded")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests whose prefill has not begun")
        self._kv_used = self._gauge("vllm:kv_cache_usage_perc", "Share of the host memory for KV in use (0 to 1)")
        self._refusals = self._counters("bubbletea:admission_rejections", "Requests refused", "reason", REFUSALS)
        self._came_back = self._counters(
            "bubbletea:retries", "Refused requests that were sent again at their Retry-After", "outcome", RETRIES
        )
        self.handed_back = self._counter(
            "bubbletea:requests_handed_back",
            "Admitted requests that failed: no worker had room, prefill failed repeatedly, or the service closed",
        )
        self.lanes = self._gauge("bubbletea:lanes", "Copies of the model whose workers are all connected")
        self._backlog = self._gauge("bubbletea:offline_backlog", "Offline requests that wait for a bubble")
        self._fill = self._gauge(
            "bubbletea:fill_ratio", "Share of the time of recent bubbles that was spent on prefill"
        )
        self._slowdown = self._gauge(
            "bubbletea:training_slowdown_ratio", "Training's iteration time divided by the planned one, minus 1"
        )
        self._fill_slowdown = self._gauge(
            "bubbletea:filling_slowdown_ratio", "Iteration time with prefill divided by that without, minus 1"
        )
        self._share = self._gauge("bubbletea:fill_share", "Share of each wait that prefill may use")
        self._overcommitted = self._gauge(
            "bubbletea:overcommitted",
            "1 while new requests are refused because training is slower than --slowdown allows",
        )
        self.iterations = Summary(
            "bubbletea:training_iteration_seconds",
            "Time of training iterations, as measured by training",
            ["model_name"],
            registry=self.registry,
        ).labels(self._model)
        self._bubbles = self._counters("bubbletea:bubbles", "Waits of training workers", "worker")
        self._bubble_s = self._counters("bubbletea:bubble_seconds", "Time training workers waited", "worker")
        self._filled_s = self._counters(
            "bubbletea:filled_seconds", "Time of these waits that was spent on prefill", "worker"
        )
        self._slices = self._counters("bubbletea:slices", "Slices of prefill that were run", "worker")
        self._late = self._counters("bubbletea:slices_late", "Slices that took longer than predicted", "worker")
        self.trouble = self._counter("bubbletea:scheduler_errors", "Errors in the scheduler after which it continued")

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # ---- events ------------------------------------------------------------------------------------------------
    def refused(self, reason: str) -> None:
        self._refusals.labels(self._model, reason).inc()

    def came_back(self, outcome: str) -> None:
        self._came_back.labels(self._model, outcome).inc()

    def cached(self, num_cached: int, num_tokens: int) -> None:
        self._queries.inc(num_tokens)
        self._hits.inc(num_cached)

    def prefilled(self, found: Prefilled, length: int) -> None:
        self.queued_s.observe((found.first_ns - found.admitted_ns) / 1e9)
        self.prefill_s.observe((found.done_ns - found.first_ns) / 1e9)
        self.prompt_size.observe(length)
        self.prompt_tokens.inc(length)

    def answered(self, first_s: float, whole_s: float, num_tokens: int, why: str) -> None:
        self.whole_s.observe(whole_s)
        self.decode_s.observe(whole_s - first_s)
        self.answer_size.observe(num_tokens)
        self.answer_tokens.inc(num_tokens)
        self.success.labels(self._model, why).inc()
        if num_tokens > 1:
            self.between_s.observe((whole_s - first_s) / (num_tokens - 1))

    def decoding(self, more: int) -> None:
        """The number of decoding requests has changed by `more`."""
        self._num_decoding += more

    def ran(self, worker: str, predicted_ns: int, took_ns: int) -> None:
        self._slices.labels(self._model, worker).inc()
        if took_ns > predicted_ns:
            self._late.labels(self._model, worker).inc()

    def waited(self, worker: str, waited_ns: int, filled_ns: int) -> None:
        self._bubbles.labels(self._model, worker).inc()
        self._bubble_s.labels(self._model, worker).inc(waited_ns / 1e9)
        self._filled_s.labels(self._model, worker).inc(filled_ns / 1e9)
        self._recent.append((waited_ns, filled_ns))

    def joined(self, worker: str) -> None:
        """Creates its counters with value 0."""
        for counter in (self._bubbles, self._bubble_s, self._filled_s, self._slices, self._late):
            counter.labels(self._model, worker)

    # ---- state -------------------------------------------------------------------------------------------------
    def gauges(self, dispatcher: Dispatcher) -> None:
        store = dispatcher.store
        self._running.set(dispatcher.num_running + self._num_decoding)
        self._waiting.set(dispatcher.num_waiting)
        self._kv_used.set(store.used_bytes / max(1, store.budget_bytes))
        self._backlog.set(dispatcher.planner.num_backlog)
        self._slowdown.set(dispatcher.planner.periods.slowdown)
        if dispatcher.limit is not None:
            self._fill_slowdown.set(dispatcher.limit.slowdown)
            self._share.set(dispatcher.limit.share)
            self._overcommitted.set(dispatcher.limit.overcommitted)
        waited_ns = sum(waited for waited, _ in self._recent)
        if waited_ns:
            self._fill.set(sum(filled for _, filled in self._recent) / waited_ns)

    # ---- making them -------------------------------------------------------------------------------------------
    # With the model's label, they exist with value 0 from the start.
    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counters(self, name: str, text: str, label: str, values: Sequence[str] = ()) -> Counter:
        """`values`: known values of the label."""
        found = Counter(name, text, ["model_name", label], registry=self.registry)
        for value in values:
            found.labels(self._model, value)
        return found

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model)
