"""Training on several processes: the same calls as one process has, through `llama_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from llama_core import Llama, LlamaConfig, positions_from_documents
from llama_parallel import (
    MicroBatch,
    accumulate_gradients,
    build_mesh,
    clip_grad_norm_,
    full_logits,
    init_shards,
    mean_loss,
    parallelize,
)
from llama_parallel.sequence_shards import shard_sequence, share_unit

from .attention_choice import choose_attend
from .batches import IGNORED, Batch
from .build import choose_ops
from .config import TrainConfig
from .evaluate import Evaluation
from .fp8 import use_fp8
from .layout_choice import keeps_float32, plan_of, sizes
from .lora import add_adapters, nothing_dropped
from .optimizer import Optimizer
from .step import StepResult, not_finite
from .trainer import bytes_at_rest, checkpoint_names, empty_whole, exact_weights
from .world import World

if TYPE_CHECKING:
    from llama_parallel.trace import CommTrace

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_AT_ONCE = 16  # held-out batches of one collective count


class OnRanks:
    """A model over a mesh. Weights rest in float32 where the run has bfloat16 with master weights.

    Raises:
        ValueError: the attention that is named cannot serve this model here.
    """

    def __init__(self, config: TrainConfig, shape: LlamaConfig, world: World) -> None:
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.rests_in = torch.float32 if keeps_float32(config) else dtype
        self._dtype, self._world, self._config = dtype, world, config
        attend, _ = choose_attend(config.attention, shape, config.data.sequence_length, world.device, dtype)
        self.mesh = build_mesh(sizes(config.parallel), world.device.type)
        with torch.device("meta"):
            # What is trained rests in float32 where the run has master weights; what is frozen never changes.
            model = Llama(shape, ops=choose_ops(config.kernels, world.device), attend=attend)
            model = model.to(dtype if config.lora.rank else self.rests_in)
        add_adapters(model, config, self.rests_in)
        if config.fp8:
            use_fp8(model.model.layers, remember=False)
        self.parallel = parallelize(model, self.mesh, plan_of(config))
        if config.model.start_from is None:
            init_shards(model, config.seed, world.device)
        else:
            model.to_empty(device=world.device)  # `load_start` fills it
        # Taken down now: while FSDP has gathered a parameter, the model shows the gathered one.
        self.shape, self.parameters = shape, dict(model.named_parameters())
        self.optimizer = Optimizer(self.parameters.items(), config.optimizer)
        self._trace: CommTrace | None = None
        if config.trace_comm:
            from llama_parallel.trace import CommTrace  # here: it brings the planner's formulas along

            self._trace = CommTrace(self.mesh)
        self._traced = 0
        shard = self.mesh["dp_shard"].size()
        self.part = self.mesh.get_local_rank("dp_replicate") * shard + self.mesh.get_local_rank("dp_shard")
        self.parts = self.mesh["dp_replicate"].size() * shard

    def step(self, micro_batches: Sequence[Batch], learning_rate: float, max_grad_norm: float) -> StepResult:
        """One optimizer step; where no token at all has a target, nothing changes."""
        counted = self._world.start_sum(sum(batch.count for batch in micro_batches))
        if self._trace is None:
            return self._step(micro_batches, counted, learning_rate, max_grad_norm)
        self._trace.transfers.clear()
        self._traced += 1
        with self._trace:
            return self._step(micro_batches, counted, learning_rate, max_grad_norm)

    def _step(
        self, micro_batches: Sequence[Batch], counted: Callable[[], int], learning_rate: float, max_grad_norm: float
    ) -> StepResult:
        own = [self._moved(batch) for batch in micro_batches]
        loss, _ = accumulate_gradients(self.parallel, own, z_loss=self._config.optimizer.z_loss)
        targets = counted() * self.parts // self._world.size  # ranks of one part count the same rows
        if targets == 0:
            self.optimizer.zero_grad()
            return StepResult(loss, torch.zeros_like(loss), 0)
        norms: dict[str, Tensor] = {}
        norm = clip_grad_norm_(self.parallel.model, max_grad_norm or float("inf"), self.mesh, norms=norms)
        self.optimizer.step(learning_rate, skip=not_finite(loss, norm))
        return StepResult(loss, norm, targets, norms)

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """Mean over every unmasked token of all batches. ValueError if there is none."""
        remaining, total, tokens = iter(batches), 0.0, 0
        while together := list(islice(remaining, _AT_ONCE * self.parts)):
            own = together[self.part :: self.parts]
            if len(own) < -(-len(together) // self.parts):  # every rank takes part in every collective
                blank = together[0]
                own.append(replace(blank, targets=torch.full_like(blank.targets, IGNORED)))
            with nothing_dropped(self.parallel.model, self._config):
                loss, count = mean_loss(self.parallel, [self._moved(self.share(batch)) for batch in own])
            total, tokens = total + float(loss) * int(count), tokens + int(count)
        if tokens == 0:
            raise ValueError("the held-out text has no token to predict; add text or raise data.held_out_fraction")
        return Evaluation(total / tokens, tokens)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """(1, S) → (1, S, V), on every rank."""
        with nothing_dropped(self.parallel.model, self._config):
            return full_logits(self.parallel, tokens)

    def weights(self) -> dict[str, Tensor]:
        """As `OneProcess` names them."""
        return {self._canonical(name): p for name, p in exact_weights(self.parameters, self.optimizer).items()}

    def tensors(self) -> dict[str, Tensor]:
        """As `OneProcess` names them; the last stage of a pipeline calls a tied head by the embedding's name."""
        names = {name: self._canonical(name) for name in self.parameters}
        tensors = checkpoint_names(self.parameters, self.optimizer)
        renamed = {}
        for key, value in tensors.items():
            for name, canonical in names.items():
                if name != canonical and key.endswith(f".{name}"):
                    key = key.removesuffix(name) + canonical
            renamed[key] = value
        return renamed

    def loaded(self) -> None:
        """Nothing is rounded from anything here."""

    def sent(self) -> list[str]:
        """What this rank sent in the last traced step: every collective the first time, then sums by kind."""
        if self._trace is None:
            return []
        table = self._trace.table().splitlines()
        if self._traced == 1:
            return table
        return [
            f"{kind}: {calls} collectives, {size / 1e6:.3f} MB sent, {1000 * seconds:.2f} ms"
            for kind, (calls, size, seconds) in sorted(self._trace.sums().items())
        ]

    def held(self) -> tuple[int, int]:
        """(parameters, bytes) of this rank's parts."""
        local = [p.to_local() if isinstance(p, DTensor) else p for p in self.parameters.values()]
        return sum(p.numel() for p in local), bytes_at_rest(self.parameters.values(), self.optimizer)

    @torch.no_grad()
    def whole(self) -> Llama | None:
        """The model on rank 0's CPU, put together tensor by tensor: a GPU holds one whole tensor at a time."""
        shape, main = self.parallel.model.config, self._world.is_main
        model = empty_whole(shape, self._config, "cpu" if main else "meta")
        of_names = {self._canonical(name): parameter for name, parameter in self.parameters.items()}
        stages = self._world.gather((self.mesh.get_local_rank("pp"), sorted(of_names)))
        group = self.mesh.get_group("pp")
        for name, target in model.named_parameters():
            owner = min(stage for stage, names in stages if name in names)
            held = of_names.get(name) if owner == self.mesh.get_local_rank("pp") else None
            value: Tensor | None = held.full_tensor() if isinstance(held, DTensor) else held
            if owner != 0:
                if value is None:
                    dtype = self._dtype if self._config.lora.rank and not target.requires_grad else self.rests_in
                    value = torch.empty(target.shape, dtype=dtype, device=self._world.device)
                dist.broadcast(value.contiguous(), src=dist.get_global_rank(group, owner), group=group)
            if main:
                assert value is not None
                target.copy_(value)
        return model if main else None

    def _canonical(self, name: str) -> str:
        tied = self.parallel.model.config.tie_word_embeddings
        return _EMBEDDING if tied and name == _HEAD else name

    def share(self, batch: Batch) -> Batch:
        """This rank's part of the rows' tokens; a length that does not divide is filled up."""
        plan = self.parallel.plan
        unit = share_unit(self.mesh["cp"].size(), plan.context) * (
            self.mesh["tp"].size() if plan.sequence_parallel else 1
        )
        missing = -batch.tokens.shape[1] % unit
        tokens, targets = F.pad(batch.tokens, (0, missing)), F.pad(batch.targets, (0, missing), value=IGNORED)
        documents = positions = None
        if batch.documents is not None:
            documents = F.pad(batch.documents, (0, missing), value=-1)
            positions = self._part(positions_from_documents(documents))
            documents = self._part(documents)
        return Batch(self._part(tokens), self._part(targets), documents, positions, batch.count)

    def _part(self, x: Tensor) -> Tensor:
        return shard_sequence(x, self.mesh, self.parallel.plan.context)

    def _moved(self, batch: Batch) -> MicroBatch:
        """A part of rows on this rank's device, where it is already if it was fetched before."""
        batch = batch.to(self._world.device)
        return MicroBatch(batch.tokens, batch.targets, batch.positions, batch.documents)
