"""AsyncLLM: requests that come, go and are cancelled while others run."""

from __future__ import annotations

import asyncio
import time

import pytest

from llama_core import Llama, generate_naive
from llama_infer import LLM, AsyncLLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def naive(model: Llama, prompt: list[int]) -> list[int]:
    return generate_naive(lambda tokens: model.logits(model(tokens)), prompt, max_new_tokens=12)


def test_many_at_once_equal_the_oracle(model: Llama) -> None:
    async def main() -> None:
        async with AsyncLLM(LLM(model, max_num_seqs=3)) as llm:
            prompts = [[1, 2, at] for at in range(8)]
            outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts))
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.token_ids == naive(model, prompt)
            chunks = [chunk.token_id async for chunk in llm.stream([1, 2, 3], GREEDY)]
            assert chunks == naive(model, [1, 2, 3])

    asyncio.run(main())


def test_a_cancelled_request_frees_its_memory_and_others_go_on(model: Llama) -> None:
    async def main() -> None:
        llm = AsyncLLM(LLM(model))
        pool = llm.llm.engine.scheduler.pool
        async for chunk in llm.stream([5, 6], SamplingParams(temperature=0.0, max_tokens=60)):
            assert chunk.finish_reason is None
            break  # closes the stream
        task = asyncio.create_task(llm.generate([7], SamplingParams(temperature=0.0, max_tokens=60)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await llm.generate([1, 2, 3], GREEDY)).token_ids == naive(model, [1, 2, 3])
        for _ in range(100):  # a generator that was broken off is closed by the loop, a moment later
            if pool.free == pool.num_blocks:
                break
            await asyncio.sleep(0.01)
        assert pool.free == pool.num_blocks
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            await llm.generate([1], GREEDY)

    asyncio.run(main())


def test_refusals_and_failures_reach_the_one_who_waits(model: Llama) -> None:
    async def main() -> None:
        async with AsyncLLM(LLM(model)) as llm:
            with pytest.raises(ValueError, match="prompt 0 has 64 tokens"):
                await llm.generate([1] * 64, GREEDY)
            with pytest.raises(ValueError, match="n must be 1, got 2"):
                async for _ in llm.stream([1], SamplingParams(n=2)):
                    pass
            handle = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
            try:
                with pytest.raises(RuntimeError, match="the engine has failed"):
                    await llm.generate([1, 2], GREEDY)
            finally:
                handle.remove()

    asyncio.run(main())


def test_a_failed_engine_is_replaced(model: Llama) -> None:
    async def main() -> None:
        async with AsyncLLM(LLM(model)) as llm:
            handle = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
            tasks = [asyncio.create_task(llm.generate([at], GREEDY)) for at in range(1, 4)]
            try:
                for task in tasks:
                    with pytest.raises(RuntimeError, match="the engine has failed"):
                        await task
            finally:
                handle.remove()
            assert isinstance(llm.failure, ZeroDivisionError)
            with pytest.raises(RuntimeError, match="the engine has failed"):
                await llm.generate([1, 2, 3], GREEDY)  # until somebody restarts it
            await asyncio.to_thread(llm.restart)
            assert llm.failure is None
            assert (await llm.generate([1, 2, 3], GREEDY)).token_ids == naive(model, [1, 2, 3])

    asyncio.run(main())


def test_no_coroutine_waits_for_a_step(model: Llama) -> None:
    """Requests and cancellations are taken up between steps; the loop goes on meanwhile."""

    async def main() -> None:
        handle = model.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.5))
        try:
            async with AsyncLLM(LLM(model)) as llm:
                first = asyncio.create_task(llm.generate([1], SamplingParams(temperature=0.0, max_tokens=1)))
                await asyncio.sleep(0.2)  # inside the step
                begun = time.perf_counter()
                second = asyncio.create_task(llm.generate([2], GREEDY))
                await asyncio.sleep(0)
                second.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await second
                assert time.perf_counter() - begun < 0.2
                await first
        finally:
            handle.remove()

    asyncio.run(main())


def test_several_requests_at_once_and_readers_that_come_late(model: Llama) -> None:
    async def main() -> None:
        async with AsyncLLM(LLM(model)) as llm:
            requests = [llm.llm.requests.request(None, [1, 2, at], GREEDY, streaming=True) for at in (3, 4)]
            running = llm.start(requests)
            while not running.done:  # nobody reads; the engine goes on
                await asyncio.sleep(0.01)
            assert not await running.news()
            for request in requests:
                assert [chunk.token_id for chunk in request.sequences[0].chunks or ()] == naive(
                    model, request.prompt_ids
                )
            running = llm.start([llm.llm.requests.request(None, [1], GREEDY)])
            llm.close()
            with pytest.raises(RuntimeError, match="closed"):
                await running.news()

    asyncio.run(main())
