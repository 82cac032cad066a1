"""A layout and one plain process train on the same global batches; their losses, gradients and weights are compared.

The one process uses nothing of this package: the plain model, torch's own clipping, one batch of all rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llama_core import Llama, LlamaConfig, PackedAttend, init_weights, positions_from_documents

from .clip import clip_grad_norm_
from .config import ParallelConfig
from .gradients import MicroBatch, accumulate_gradients
from .mesh import build_mesh
from .parallel import Parallel, ParallelPlan, parallelize
from .sequence_shards import shard_sequence
from .shards import EMBEDDING, HEAD, init_shards, local_parts

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained: a model, SGD, and one global batch for each step."""

    model: LlamaConfig
    tokens: Tensor
    """(steps, rows, S)."""
    targets: Tensor
    """(steps, rows, S), -100 where a token does not count."""
    accumulation: int = 1
    """Micro-batches of each data-parallel rank and step."""
    learning_rate: float = 0.1
    max_norm: float = float("inf")
    seed: int = 0
    dtype: torch.dtype = torch.float64
    prepare: Callable[[Llama], None] | None = None
    """Changes the initial weights, in the same way whatever part of them is there."""
    documents: Tensor | None = None
    """(steps, rows, S), integers that change from one packed document to the next."""


@dataclass
class Record:
    """What happened, with parameters and gradients whole."""

    initial: Weights = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Gradient norm of each step, before clipping."""
    gradients: Weights = field(default_factory=dict)
    """Of the first step, before clipping; those of later steps show in the weights."""
    weights: Weights = field(default_factory=dict)
    """After the last step."""
    parts: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Of each parameter after the last step: where this rank's part lies, and its digest."""


def train_alone(task: Task, device: torch.device | str = "cpu") -> Record:
    """One process, the whole global batch at once: the oracle. On the layout's kind of device: cosines, which are
    float32 always, differ in the last bit between CPU and GPU, and float64 comparisons would see it."""
    with torch.device("meta"):
        model = Llama(task.model)
    model = model.to(task.dtype).to_empty(device=device)
    init_weights(model, task.seed)
    if task.prepare is not None:
        task.prepare(model)
    record = Record(initial=_copies(model))
    for tokens, targets, documents in _steps(task):
        model.zero_grad()
        assert model.lm_head is not None
        tokens, targets = tokens.to(device), targets.to(device)
        documents = None if documents is None else documents.to(device)
        packed = () if documents is None else (positions_from_documents(documents), PackedAttend(documents))
        hidden = model(tokens, *packed)
        loss_sum = model.ops.linear_cross_entropy(hidden, model.lm_head.weight, targets, reduction="sum")
        loss = loss_sum / (targets != -100).sum().clamp(min=1)
        loss.backward()
        record.losses.append(float(loss.detach()))
        record.gradients = record.gradients or _gradients(model)
        record.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)))
        _descend(model, task.learning_rate)
    record.weights = _copies(model)
    return record


def train_on_ranks(
    rank: int, task: Task, layout: ParallelConfig, plan: ParallelPlan | None = None, device: str = "cpu"
) -> Record:
    """One rank of a layout, in a process group that exists; every rank returns the whole record, on the CPU."""
    parallel = make_parallel(task, layout, plan, device)
    record = Record(initial=_everywhere(parallel, _copies(parallel.model)))
    for tokens, targets, documents in _steps(task):
        parallel.model.zero_grad()
        loss, _ = accumulate_gradients(parallel, shares(parallel, tokens, targets, task.accumulation, documents))
        record.losses.append(float(loss.detach()))
        record.gradients = record.gradients or _everywhere(parallel, _gradients(parallel.model))
        record.norms.append(float(clip_grad_norm_(parallel.model, task.max_norm, parallel.mesh)))
        _descend(parallel.model, task.learning_rate)
    record.weights = _everywhere(parallel, _copies(parallel.model))
    ends = _ends(task.model)
    for name, local, _, offsets in local_parts(parallel.model):
        record.parts[ends.get(name, name)] = offsets, _digest(local)
    return record


def make_parallel(
    task: Task, layout: ParallelConfig, plan: ParallelPlan | None = None, device: str = "cpu"
) -> Parallel:
    """The task's model on this rank, with its initial weights."""
    with torch.device("meta"):
        model = Llama(task.model).to(task.dtype)
    parallel = parallelize(model, build_mesh(layout, torch.device(device).type), plan)
    init_shards(model, task.seed, device)
    if task.prepare is not None:
        task.prepare(model)
    return parallel


def shares(
    parallel: Parallel, tokens: Tensor, targets: Tensor, accumulation: int = 1, documents: Tensor | None = None
) -> list[MicroBatch]:
    """This rank's part of a global batch (rows, S): its rows over dp, its pieces of them over cp, as micro-batches."""
    mesh = parallel.mesh
    index = mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
    count = mesh["dp_replicate"].size() * mesh["dp_shard"].size()
    device = next(parallel.model.parameters()).device
    whole = {"tokens": tokens, "targets": targets}
    if documents is not None:
        whole |= {"documents": documents, "positions": positions_from_documents(documents)}
    own = {
        name: shard_sequence(x.chunk(count)[index], mesh, parallel.plan.context).to(device).chunk(accumulation)
        for name, x in whole.items()
    }
    return [MicroBatch(**dict(zip(own, parts, strict=True))) for parts in zip(*own.values(), strict=True)]


def _steps(task: Task) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Tokens, targets and documents of each step."""
    documents = [None] * len(task.tokens) if task.documents is None else task.documents
    return zip(task.tokens, task.targets, documents, strict=True)


def differences(found: Record, wanted: Record) -> dict[str, float]:
    """Largest differences, relative to the largest element of what is compared; by what is compared.

    Keys: "loss", "norm", "gradient of NAME", "weight NAME".
    """
    result = {"loss": _worst(found.losses, wanted.losses), "norm": _worst(found.norms, wanted.norms)}
    for title, ours, theirs in (
        ("gradient of", found.gradients, wanted.gradients),
        ("weight", found.weights, wanted.weights),
    ):
        assert ours.keys() == theirs.keys(), (title, ours.keys() ^ theirs.keys())
        result.update({f"{title} {name}": relative(ours[name], theirs[name]) for name in theirs})
    return result


def relative(found: Tensor, wanted: Tensor) -> float:
    """max |found - wanted| / max |wanted|; infinity where shapes or finiteness differ."""
    if found.shape != wanted.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    scale = float(wanted.abs().max()) or 1.0
    return float((found - wanted).abs().max()) / scale


def _worst(found: Sequence[float], wanted: Sequence[float]) -> float:
    return relative(torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone().cpu()


def _copies(model: Llama) -> Weights:
    return {name: _whole(p) for name, p in model.named_parameters()}


def _everywhere(parallel: Parallel, own: Weights) -> Weights:
    """Parameters of all stages on every rank, in the order of the whole model."""
    if parallel.pipeline is None:
        return own
    of_ranks: list[Weights] = [{}] * parallel.pipeline.group.size()
    dist.all_gather_object(of_ranks, own, group=parallel.pipeline.group)
    with torch.device("meta"):
        names = [name for name, _ in Llama(parallel.model.config).named_parameters()]
    found = {name: tensor for weights in of_ranks for name, tensor in weights.items()}
    for name, other in _ends(parallel.model.config).items():
        assert torch.equal(found[name], found[other]), f"{name} and {other} differ"
    return {name: found[name] for name in names if name in found}


def _ends(config: LlamaConfig) -> dict[str, str]:
    """What the last stage of a pipeline calls a tied matrix, and what the whole model does."""
    return {HEAD: EMBEDDING} if config.tie_word_embeddings else {}


def _gradients(model: Llama) -> Weights:
    return {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def _descend(model: Llama, learning_rate: float) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.sub_(p.grad, alpha=learning_rate)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
