"""What one rank sends in one step, by formula: the planner's communication, and what tests hold the trace against.

Bytes are those that a rank sends with ring algorithms (Thakur et al. 2005, https://doi.org/10.1177/1094342005051521):
of N bytes in all that n ranks gather, a rank passes on all but its own part, (n-1)/n · N; a reduce-scatter of N bytes
is the same backwards; an all-reduce is both, 2 (n-1)/n · N; in an all-to-all a rank keeps 1/n of its N. What a library
really does may differ (trees, NVLink's in-switch sums), but not by much for large messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llama_core import LlamaConfig

from .parameters import Stage, elements, kv_rows, shard_elements, stages
from .work import Work

KINDS = {
    "tp": "tp",
    "dp_shard_cp": "dp",
    "dp_replicate": "dp",
    "cp": "cp",
    "pp": "pp",
    "dp_cp": "sums",
    "world": "sums",
}
"""Of every mesh dimension that talks, the kind of parallelism; "sums" are the step's few scalars."""


@dataclass(frozen=True)
class Volume:
    """One collective of our code, as often as it runs in a step on one rank."""

    dim: str
    """Name of the mesh dimension."""
    operation: str
    what: str
    calls: float
    sent: float
    """Bytes of all calls together."""
    hidden: bool = False
    """Whether arithmetic runs beside it."""

    @property
    def kind(self) -> str:
        """tp, dp, cp, pp or sums."""
        return KINDS[self.dim]


def gathered(total: float, ranks: int) -> float:
    """Bytes a rank sends in an all-gather to `total`, or a reduce-scatter of it."""
    return total * (ranks - 1) / ranks


def reduced(total: float, ranks: int) -> float:
    """Bytes a rank sends in an all-reduce of `total`."""
    return 2 * gathered(total, ranks)


def volumes(work: Work, pipeline_rank: int = 0) -> list[Volume]:
    """Everything that a rank of one pipeline stage sends in a step."""
    stage = stages(work.model, work.layout.pp, work.stages_per_rank)[pipeline_rank]
    found = [*_tensor(work, stage), *_context(work, stage), *_data(work, stage), *_pipeline(work, pipeline_rank)]
    found += _sums(work)
    return [volume for volume in found if volume.calls and volume.sent]


def _tensor(work: Work, stage: Stage) -> Iterator[Volume]:
    ranks, passes, model = work.layout.tp, work.micro_batches, work.model
    if ranks == 1:
        return
    compute, wide = work.bytes_of.compute, max(4, work.bytes_of.compute)
    stream = work.tokens * model.hidden_size * compute  # the residual stream of a micro-batch, whole
    layers, again = stage.layers * passes, work.checkpointing != "none"
    full = work.checkpointing == "full"
    vectors = model.hidden_size * wide  # norm weights' gradients are summed in float32 at least

    def collective(operation: str, what: str, calls: float, size: float, hidden: bool = False) -> Volume:
        factor = reduced if operation == "all_reduce" else gathered
        return Volume("tp", operation, what, calls, calls * factor(size, ranks), hidden)

    if work.sequence_parallel:
        # forward: into q, k, v and into gate, up; recomputed by both forms of checkpointing
        yield collective("all_gather", "into column products", layers * (4 if again else 2), stream)
        # backward: x once more, behind the product for its gradient (column_products.py)
        yield collective("all_gather", "into column products, backward", layers * 2, stream, hidden=True)
        # out of o and down; full checkpointing repeats o's, and stops before down's, which nothing needs
        yield collective("reduce_scatter", "out of row products", layers * (3 if full else 2), stream)
        yield collective("all_gather", "out of row products, backward", layers * 2, stream)
        yield collective("reduce_scatter", "into column products, backward", layers * 2, stream, hidden=True)
        norms = layers * (2 + model.attention_bias + model.mlp_bias)  # o's and down's biases lie like norms
        yield collective("all_reduce", "gradients of norms", norms, vectors)
    else:
        yield collective("all_reduce", "out of row products", layers * (3 if full else 2), stream)
        yield collective("all_reduce", "into column products, backward", layers * 2, stream, hidden=True)
    if model.kv_heads % ranks:
        of_kv = kv_rows(model, ranks) * (model.hidden_size * 2 + 2 * model.attention_bias) * wide
        calls = 2 + 2 * model.attention_bias
        yield collective("all_reduce", "gradients of k and v", layers * calls, of_kv / calls)
    if stage.embedding:
        if work.sequence_parallel:
            yield collective("reduce_scatter", "out of the embedding", passes, stream)
            yield collective("all_gather", "out of the embedding, backward", passes, stream)
        else:
            yield collective("all_reduce", "out of the embedding", passes, stream)
    if stage.head:
        # two numbers of each row (vocab_loss.py), of every rank
        yield collective("all_gather", "log-sum-exp and target", passes, ranks * work.tokens * 2 * wide)
        if work.sequence_parallel:
            yield collective("all_gather", "into the head", passes, stream)
            yield collective("reduce_scatter", "into the head, backward", passes, stream)
            yield collective("all_reduce", "gradient of the last norm", passes, vectors)
        else:
            yield collective("all_reduce", "into the head, backward", passes, stream / compute * wide)


def kv_heads_of_rank(model: LlamaConfig, tp: int) -> int:
    """Key/value heads that a tensor-parallel rank computes with."""
    return max(1, model.kv_heads // tp)


def _context(work: Work, stage: Stage) -> Iterator[Volume]:
    ranks, model = work.layout.cp, work.model
    if ranks == 1:
        return
    compute, wide, calls = work.bytes_of.compute, max(4, work.bytes_of.compute), stage.layers * work.micro_batches
    heads, kv_heads = model.num_attention_heads // work.layout.tp, kv_heads_of_rank(model, work.layout.tp)
    forward = 2 if work.checkpointing == "full" else 1
    of_head = work.tokens * model.head_width
    if work.context == "ring":  # ring_attention.py: K and V go round, dK and dV behind them in float32
        one = 2 * of_head * kv_heads
        shifts, grads = calls * (ranks - 1) * (forward + 1), calls * ranks
        yield Volume("cp", "shift", "K and V", shifts, shifts * one * compute, hidden=True)
        yield Volume("cp", "shift", "dK and dV", grads, grads * one * wide, hidden=True)
        return
    own, group = heads // ranks, heads // kv_heads
    window = max((rank * own + own - 1) // group - rank * own // group + 1 for rank in range(ranks))
    sizes = (heads + 2 * ranks * window, heads)  # q, k, v there (ulysses.py), the result back
    for what, size in zip(("q, k, v to heads", "result to tokens"), sizes, strict=True):
        yield Volume(
            "cp",
            "all_to_all",
            what,
            calls * (forward + 1),
            calls * (forward + 1) * gathered(of_head * size * compute, ranks),
        )


def _data(work: Work, stage: Stage) -> Iterator[Volume]:
    layout, sizes, passes = work.layout, work.bytes_of, work.micro_batches
    groups = stage.groups(work.model, layout.tp)
    ranks, copies = work.shards, layout.dp_replicate
    if not work.fsdp:
        if copies > 1:  # buckets of gradients (replicate.py); with a tied head the embedding is there once
            total = sum(elements(group) for group in groups) * sizes.parameter
            yield Volume("dp_replicate", "all_reduce", "gradients", len(groups), reduced(total, copies), hidden=True)
        return
    shard = sum(shard_elements(group, ranks) for group in groups)
    tail = shard_elements(groups[-1], ranks)
    if ranks > 1:
        # Layers and embedding: for forward and for backward. Norm and head stay from one to the other. Without
        # resharding (pipelines) everything is gathered once and stays until the last micro-batch's backward pass.
        times = 2 * passes if work.reshards else 1
        parts = len(groups) - 1
        sent = (ranks - 1) * (shard - tail) * sizes.compute
        yield Volume("dp_shard_cp", "all_gather", "parameters", parts * times, sent * times, hidden=True)
        of_tail = passes if work.reshards else 1
        if tail:
            sent = (ranks - 1) * tail * sizes.compute * of_tail
            yield Volume("dp_shard_cp", "all_gather", "last norm and head", of_tail, sent, hidden=True)
        sent = (ranks - 1) * shard * sizes.reduce
        yield Volume("dp_shard_cp", "reduce_scatter", "gradients", parts + bool(tail), sent, hidden=True)
    if copies > 1:
        total = shard * sizes.reduce
        yield Volume("dp_replicate", "all_reduce", "gradients", len(groups), reduced(total, copies), hidden=True)


def _pipeline(work: Work, rank: int) -> Iterator[Volume]:
    """Hidden states to the next stage, their gradients to the one before; a tp rank sends its share of the sequence."""
    ranks = work.layout.pp
    if ranks == 1:
        return
    one = work.tokens * work.model.hidden_size * work.bytes_of.compute // work.stream_ranks
    chunks = work.stages_per_rank
    forward = work.micro_batches * (chunks - (rank == ranks - 1))
    backward = work.micro_batches * (chunks - (rank == 0))
    yield Volume("pp", "send", "hidden states", forward, forward * one, hidden=True)
    yield Volume("pp", "send", "gradients of hidden states", backward, backward * one, hidden=True)


def _sums(work: Work) -> Iterator[Volume]:
    """The counted tokens (int64), the loss and the squared gradient norm (float64), a scalar each."""
    batch, world = work.layout.dp * work.layout.cp, work.layout.num_processes
    if batch > 1:
        size = 8 + max(4, work.bytes_of.compute)
        yield Volume("dp_cp", "all_reduce", "counted tokens and loss", 2, reduced(size, batch))
    if work.layout.pp > 1:  # the loss, from the last stage to all
        yield Volume("world", "all_reduce", "loss", 1, reduced(max(4, work.bytes_of.parameter), work.layout.pp))
    if world > 1:
        yield Volume("world", "all_reduce", "gradient norm", 1, reduced(8, world))
