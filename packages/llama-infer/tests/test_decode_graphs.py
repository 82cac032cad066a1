"""The batches of CUDA graphs, replayed without a GPU: the same pass, run anew where a graph would be replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llama_core import Llama, generate_naive
from llama_infer import LLM, SamplingParams
from llama_infer.decode_graphs import DecodeGraphs, _Graph


class Replayed(DecodeGraphs):
    """Its "graph" is the pass itself, into the tensors that a graph would write."""

    replays: dict[tuple[int, int, int], int]

    def _capture(self, rows: int, blocks: int, width: int) -> _Graph:
        inputs = self._blank(rows, blocks, width)
        bounds = torch.arange(0, rows * width + 1, width, dtype=torch.int32) if width > 1 else None
        before = self.cache.memory.clone()
        hidden, logits = self._pass(inputs, rows, blocks, width, bounds)
        torch.testing.assert_close(self.cache.memory, before, rtol=0, atol=0, equal_nan=True)  # padding writes nothing
        self.__dict__.setdefault("replays", {})

        def replay() -> None:
            key = rows, blocks, width
            self.replays[key] = self.replays.get(key, 0) + 1
            for target, new in zip((hidden, logits), self._pass(inputs, rows, blocks, width, bounds), strict=True):
                target.copy_(new)

        graph: Any = type("Graph", (), {"replay": staticmethod(replay)})
        return _Graph(graph, inputs, bounds, hidden, logits)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], LLM]:
    """Gives an LLM on a CPU, its paged kernels' plain path, and graphs that are none."""
    monkeypatch.setattr("llama_infer.engine_build.attention_for", lambda *_: None)
    monkeypatch.setattr("llama_infer.draft.attention_for", lambda *_: None)

    def add(llm: LLM) -> LLM:
        runners = [llm.engine.runner] + ([llm.engine.drafter.runner] if llm.engine.drafter else [])
        for runner in runners:
            runner.cache.memory.zero_()
            blocks = runner._tables.shape[1]
            runner._graphs = Replayed(runner.model, runner.cache, runner.newest, len(runner.newest), blocks)
        return llm

    return add


@pytest.mark.parametrize("draft_seed", [0, 9])
@pytest.mark.usefixtures("graphs")
def test_paged_steps_without_graphs_equal_the_oracle(
    model: Llama, make_model: Callable[..., Llama], draft_seed: int
) -> None:
    """What a GPU does with enforce_eager: a draft reads its own newest tokens where they were left."""
    llm = LLM(model, draft=make_model(seed=draft_seed), block_size=4, max_num_seqs=5, max_num_batched_tokens=24)
    assert llm.engine.runner.attend_rows is None
    llm.engine.runner.cache.memory.zero_()
    prompts = [[1, 2, 3], list(range(30)), [5, 6] * 8, [9]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = generate_naive(lambda ids: model.logits(model(ids)), prompt, max_new_tokens=20)
        assert output.token_ids == expected
    assert (llm.acceptance_rate == 1.0) == (draft_seed == 0)


@pytest.mark.parametrize("guess", ["none", "text", "draft"])
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_tokens_equal_the_oracle(
    model: Llama, graphs: Callable[[Any], LLM], guess: str, overlap: bool, make_model: Callable[..., Llama]
) -> None:
    settings: dict[str, Any] = {"none": {}, "text": {"speculative_tokens": 3}, "draft": {"draft": model}}[guess]
    llm = LLM(model, block_size=4, max_num_seqs=5, **settings)
    llm.engine.overlap = overlap and guess == "none"
    graphs(llm)
    prompts = [[1, 2, 3], [7, 7, 7, 7, 7, 7], list(range(30)), [5, 6] * 8, [9], [200, 3, 200, 3, 200]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = generate_naive(lambda ids: model.logits(model(ids)), prompt, max_new_tokens=20)
        assert output.token_ids == expected
    held: Any = llm.engine.runner._graphs
    widths = {width for _, _, width in held.replays}
    if guess == "none":
        assert widths == {1}
    else:
        assert max(widths) > 1  # guessed steps are replayed
        assert llm.engine.accepted > 0
    if guess == "draft":
        assert widths >= {5}
        drafted: Any = llm.engine.drafter.runner._graphs  # type: ignore[union-attr]
        assert {width for _, _, width in drafted.replays} == {1}


def test_what_a_graph_takes(model: Llama) -> None:
    from llama_infer.scheduler import Work
    from llama_infer.sequence import Sequence

    sequence = Sequence([1, 2, 3], SamplingParams(), 9)

    def work(count: int, guesses: tuple[int, ...] = (), samples: bool = True) -> Work:
        return Work(sequence, 2, count, samples, guesses)

    assert DecodeGraphs.takes([work(1), work(1)])
    assert DecodeGraphs.takes([work(3, (8, 9)), work(3, (5, 6))])
    assert not DecodeGraphs.takes([work(1), work(2, (9,))])
    assert not DecodeGraphs.takes([work(1, samples=False)])
    assert not DecodeGraphs.takes([work(2)])  # a prompt's part
    assert not DecodeGraphs.takes([work(40, (1,) * 39)])
