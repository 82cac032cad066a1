"""Seconds of a step: arithmetic, communication that arithmetic does not hide, the pipeline's bubble, the optimizer.

No more than a sum of ratios, amount over rate, with the rates of `Hardware`: good for comparing layouts, and to tell
what a step spends its time on. It knows nothing of jitter, of launch overhead or of how small products run slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_core import LlamaConfig
from llama_parallel.schedules import bubble

from .comm_volume import Volume, volumes
from .hardware import Hardware
from .parameters import Stage, elements, layer_parameters, stage_elements, stages, vocabulary_rows
from .work import Work

_STEPS = {"all_reduce": 2}
"""Rounds over the ring of a collective, 1 unless named here."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one step on the slowest rank, and what follows from them."""

    compute: float
    """Products, attention and memory-bound operations of all micro-batches."""
    communication: dict[str, float]
    """By kind (tp, dp, cp, pp, sums): all of it, hidden or not."""
    exposed: float
    """Of it, what arithmetic does not hide."""
    bubble: float
    """Waiting of pipeline stages for each other."""
    optimizer: float
    sent: dict[str, float]
    """Bytes that a rank sends, by kind."""
    tokens_per_second: float
    """Of one GPU."""
    mfu: float
    """By picotron's formula (llama-train's): 6 for each parameter, 12 · layers · width · sequence for attention."""

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.compute + self.exposed + self.bubble + self.optimizer


def predict_cost(work: Work, hardware: Hardware) -> Cost:
    """Of the slowest pipeline rank."""
    found = []
    for rank, stage in enumerate(stages(work.model, work.layout.pp, work.stages_per_rank)):
        compute = work.micro_batches * _compute(work, stage, hardware)
        sent = volumes(work, rank)
        exposed = _exposed(work, sent, compute, hardware)
        found.append((compute + exposed, compute, exposed, sent, rank))
    busy, compute, exposed, sent, rank = max(found, key=lambda item: item[0])
    idle = bubble(work.schedule, work.layout.pp, work.micro_batches, virtual=work.stages_per_rank)
    waiting = busy * idle / (1 - idle)  # `bubble` is a share of the whole
    optimizer = _optimizer(work, stages(work.model, work.layout.pp, work.stages_per_rank)[rank], hardware)
    seconds = busy + waiting + optimizer
    kinds = sorted({volume.kind for volume in sent})
    speed = work.global_batch * work.sequence_length / seconds / work.layout.num_processes
    return Cost(
        compute=compute,
        communication={k: sum(_seconds(work, v, hardware) for v in sent if v.kind == k) for k in kinds},
        exposed=exposed,
        bubble=waiting,
        optimizer=optimizer,
        sent={k: sum(v.sent for v in sent if v.kind == k) for k in kinds},
        tokens_per_second=speed,
        mfu=speed * flops_per_token(work.model, work.sequence_length) / hardware.peak_flops,
    )


def flops_per_token(model: LlamaConfig, sequence_length: int) -> float:
    """picotron's count, both embedding tables included and attention not halved for causality."""
    total = model.num_hidden_layers * elements(layer_parameters(model, 1)) + model.hidden_size
    total += model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    width = model.num_attention_heads * model.head_width
    return 6.0 * total + 12.0 * model.num_hidden_layers * width * sequence_length


def _compute(work: Work, stage: Stage, hardware: Hardware) -> float:
    """Seconds of arithmetic of one micro-batch, forward and backward.

    A product with P weights takes 2 P FLOPs a token forward and 4 P backward (Kaplan et al. 2020, section 2.1). Causal
    attention takes two products over S/2 keys on average, 2 · 2 · S/2 · H·D, and 2.5 times that backward, which
    computes the scores again. Full checkpointing repeats a layer's forward pass.
    """
    model, tokens, tp = work.model, work.tokens, work.layout.tp
    forward = 2 if work.checkpointing == "full" else 1
    products = 2.0 * tokens * elements(layer_parameters(model, tp)) * (2 + forward)
    queries = model.num_attention_heads // tp * model.head_width
    attention = 2.0 * tokens * work.sequence_length * queries * (2.5 + forward)
    layer = products / hardware.product_flops + attention / hardware.attention_flops
    layer += _moved(work) / hardware.memory_bandwidth
    head = 6.0 * tokens * vocabulary_rows(model, tp) * model.hidden_size / hardware.product_flops if stage.head else 0.0
    return stage.layers * layer + head


def _moved(work: Work) -> float:
    """Bytes that a layer's memory-bound operations read and write for one micro-batch, forward and backward.

    Tensors of width E: the first norm reads and writes 1 + 1, backward 3 with the gradient of the stream added in; add
    and second norm 2 + 2 and 4; the last addition 3; backward's own additions 3: 19. Rotary positions read and write
    queries and keys twice: 4. SwiGLU 3 forward and 5 backward of width F. Checkpointing repeats the forward ones.
    """
    model, tp, compute = work.model, work.layout.tp, work.bytes_of.compute
    again = work.checkpointing != "none"
    stream = model.hidden_size / work.stream_ranks * (19 + 6 * again)
    heads = (model.num_attention_heads + model.kv_heads) / tp * model.head_width * (4 + 2 * again)
    inner = model.intermediate_size / tp * (8 + 3 * again)
    return work.tokens * compute * (stream + heads + inner)


def _optimizer(work: Work, stage: Stage, hardware: Hardware) -> float:
    """Fused AdamW reads weight, gradient and moments and writes all but the gradient; clipping reads and scales it."""
    sizes = work.bytes_of
    own = stage_elements(stage, work.model, work.layout.tp, work.shards if work.fsdp else 1)
    trained = sizes.master or sizes.parameter
    moved = own * (3 * trained + 4 * sizes.moment + 3 * trained + (sizes.parameter if sizes.master else 0))
    return moved / hardware.memory_bandwidth


def _stride(work: Work, dim: str) -> tuple[int, int]:
    """(distance between neighbours, members) of a mesh dimension; see build_mesh for the order."""
    layout = work.layout
    tp, data = layout.tp, work.shards
    found: dict[str, tuple[int, int]] = {
        "tp": (1, tp),
        "cp": (tp, layout.cp),
        "dp_shard_cp": (tp, data),
        "dp_replicate": (tp * data, layout.dp_replicate),
        "dp_cp": (tp, data * layout.dp_replicate),
        "pp": (tp * data * layout.dp_replicate, layout.pp),
        "world": (1, layout.num_processes),
    }
    return found[dim]


def _seconds(work: Work, volume: Volume, hardware: Hardware) -> float:
    stride, size = _stride(work, volume.dim)
    bandwidth, latency = hardware.links(stride, size)
    if volume.operation in ("send", "shift"):
        rounds = 1.0  # to the neighbour; one GPU has one adapter, however many of its host are in the group
        bandwidth = hardware.nvlink_bandwidth if stride * size <= hardware.gpus_per_node else hardware.network_bandwidth
    else:
        rounds = float(_STEPS.get(volume.operation, 1))
    return volume.calls * rounds * latency + volume.sent / bandwidth


def _exposed(work: Work, sent: list[Volume], compute: float, hardware: Hardware) -> float:
    """Seconds of communication that arithmetic does not hide.

    What runs beside arithmetic costs only what exceeds it, by kind: links of different kinds work at the same time.
    Of a step's arithmetic, tensor parallelism has the products beside which its backward collectives run, a quarter;
    the ring has its attention; the rest has all of it. Parameters of the first layer, and gradients of the last to
    come, have nothing to hide behind.
    """
    attention = 7.0 * work.tokens * work.sequence_length * work.model.num_attention_heads / work.layout.tp
    attention *= work.model.head_width * work.model.num_hidden_layers / work.layout.pp * work.micro_batches
    beside = {"tp": compute / 4, "cp": attention / hardware.attention_flops, "dp": compute, "pp": compute, "sums": 0.0}
    total = 0.0
    for kind, room in beside.items():
        of_kind = [volume for volume in sent if volume.kind == kind]
        total += sum(_seconds(work, volume, hardware) for volume in of_kind if not volume.hidden)
        hidden = sum(_seconds(work, volume, hardware) for volume in of_kind if volume.hidden)
        edge = hidden / max(1, work.model.num_hidden_layers // work.layout.pp) if kind == "dp" else 0.0
        total += max(hidden - room, edge)
    return total
