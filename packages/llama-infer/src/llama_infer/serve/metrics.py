"""/metrics: what Prometheus reads. One registry for each server, so that two in a process count apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llama_infer.engine import Engine
from llama_infer.sequence import Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What the server counts.

    Args:
        engine: gives the engine that runs now; a failed one is replaced by another.
    """

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(engine))
        here: dict[str, Any] = {"namespace": "llama_infer", "registry": self.registry}
        self.requests = Counter("requests", "Sequences that were admitted, by how they ended.", ["reason"], **here)
        self.refused = Counter("requests_refused", "Requests for which the queue had no place.", **here)
        self.prompt = Counter("prompt_tokens", "Tokens of prompts.", **here)
        self.cached = Counter("prompt_tokens_cached", "Of them, those found in the cache (prefix hits).", **here)
        self.generated = Counter("generation_tokens", "Tokens produced.", **here)
        self.first = Histogram("time_to_first_token_seconds", "From arrival.", buckets=FIRST, **here)
        self.between = Histogram(
            "time_between_tokens_seconds", "As streams are handed their tokens.", buckets=BETWEEN, **here
        )
        self.whole = Histogram("request_seconds", "From arrival to the last token.", buckets=WHOLE, **here)
        self.restarts = Counter("engine_restarts", "Engines that replaced one that had failed.", **here)

    def ended(self, sequence: Sequence) -> None:
        """Count one that has ended, or that nobody waits for any more."""
        self.requests.labels(sequence.finish_reason or "abort").inc()
        self.prompt.inc(len(sequence.prompt_ids))
        self.cached.inc(sequence.cached or 0)
        self.generated.inc(len(sequence.token_ids))
        times = sequence.sample().timings if sequence.has_ended() else None
        if times is not None and times.first_token is not None:
            self.first.observe(times.first_token - times.arrived)
            if times.finished is not None:
                self.whole.observe(times.finished - times.arrived)

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _OfEngine(Collector):
    """Read from the engine when Prometheus asks; its counters begin anew with a new engine, as Prometheus expects."""

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        return iter(())  # or registering would ask the engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine()
        if engine is None:
            return
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        gauges = {
            "requests_waiting": ("Sequences in the queue.", len(scheduler.waiting)),
            "requests_running": ("Sequences that run.", len(scheduler.running)),
            "cache_usage_ratio": ("Blocks of the key/value cache in use.", 1 - pool.free / max(1, pool.num_blocks)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"llama_infer_{name}", text, value)
        counters = {
            "preemptions": ("Sequences that gave their memory to others for a while.", scheduler.preemptions),
            "tokens_guessed": ("Tokens guessed ahead.", engine.guessed),
            "tokens_accepted": ("Guesses that were right.", engine.accepted),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"llama_infer_{name}", text, value)
