"""Packed documents on several ranks: the rows, their borders and the training are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from llama_core import positions_from_documents
from llama_parallel import Process
from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, train
from llama_train.batches import IGNORED
from llama_train.build import model_config
from llama_train.cli import main
from llama_train.config import DataConfig, ParallelSettings
from llama_train.prepare import prepare, training_rows
from llama_train.world import World

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("best-fit", {"dp_shard": 2}),
    ("cut", {"cp": 2}),
    ("best-fit", {"cp": 2}),
    ("best-fit", {"cp": 2, "context": "ulysses"}),
    ("cut", {"tp": 2}),
    ("best-fit", {"pp": 2}),
]


@pytest.fixture(scope="module")
def shards(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Texts, and prompts with answers, of all lengths up to a row and more."""
    folder = tmp_path_factory.mktemp("packed")
    data = DataConfig(source=str(text_folder), vocab_size=300)
    tokenizer = prepare(data, folder / "tokenizer").tokenizer
    random = Random(0)
    texts = [{"text": "".join(random.choices("abcdef x=\n", k=random.randint(1, 60)))} for _ in range(60)]
    chats = [{"prompt": "f" * random.randint(1, 20), "completion": "x" * random.randint(1, 20)} for _ in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts + chats))
    command = ["prepare", str(folder / "texts.jsonl"), "--tokenizer", str(tokenizer)]
    assert main([*command, "--output", str(folder / "shards")]) == 0
    return str(folder / "shards")


@pytest.fixture
def packed(tiny: TrainConfig, change: Change, shards: str) -> TrainConfig:
    """A float64 run of 3 steps over them."""
    keys = {
        "dtype": "float64",
        "model.num_attention_heads": 4,
        "model.num_key_value_heads": 2,
        "data.sources": (shards,),
        "data.sequence_length": 36,  # does not divide over the shares of a ring: it is filled up
        "data.micro_batch_size": 2,
        "data.gradient_accumulation_steps": 2,
        "schedule.warmup_steps": 1,
        "schedule.steps": 3,
    }
    return change(tiny, **keys)


def _on(layout: dict[str, Any], config: TrainConfig, folder: Path) -> tuple[TrainConfig, int]:
    parallel = replace(ParallelSettings(dp_shard=1), **layout)
    dp = parallel.dp_replicate * parallel.dp_shard
    data = replace(config.data, micro_batch_size=config.data.micro_batch_size // dp)
    ranks = dp * parallel.cp * parallel.tp * parallel.pp
    return replace(config, parallel=parallel, data=data, folder=str(folder)), ranks


def _records(folder: str | Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(str(folder)) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("packing", "layout"), CASES, ids=str)
def test_packed_rows_train_as_on_one_process(
    packing: str, layout: dict[str, Any], packed: TrainConfig, change: Change, tmp_path: Path, recorder: Make
) -> None:
    """B29 on ranks: loss, gradient norm and held-out loss, to what float64 loses when sums change their order."""
    alone = change(packed, folder=str(tmp_path / "alone"), **{"data.packing": packing})
    train(alone, recorder())
    config, ranks = _on(layout, alone, tmp_path / "ranks")
    run_ranks(lambda rank: train(config, recorder()).step, ranks, timeout=120)
    expected, found = _records(alone.folder), _records(config.folder)
    assert [record["kind"] for record in found] == ["train"] * 3 + ["held_out"]
    for record, wanted in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm") if record["kind"] == "train" else ("loss", "bits_per_byte"):
            assert record[key] == pytest.approx(wanted[key], rel=1e-10)
    # without the borders it would be another training
    unmasked = change(alone, folder=str(tmp_path / "unmasked"), **{"data.mask_documents": False})
    if layout == {"dp_shard": 2}:
        train(unmasked, recorder())
        assert abs(_records(unmasked.folder)[0]["loss"] - expected[0]["loss"]) > 1e-4


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_the_shares_of_a_row_are_the_row(context: str, packed: TrainConfig, change: Change, tmp_path: Path) -> None:
    """Tokens, targets, documents and positions of dp 2 × cp 2 together: each place once, as one process has it."""
    whole = change(packed, **{"data.packing": "best-fit"})
    config, ranks = _on({"dp_shard": 2, "cp": 2, "context": context}, whole, tmp_path / "run")
    data = prepare(whole.data, tmp_path / "data")
    batches = training_rows(data, whole.data, whole.seed).micro_batches(7, 2, 2)
    total = []
    for batch in batches:
        assert batch.documents is not None
        columns = (batch.tokens, batch.targets, positions_from_documents(batch.documents), batch.documents)
        total += list(zip(*(column.flatten().tolist() for column in columns), strict=True))

    def work(rank: int) -> tuple[list[tuple[int, ...]], list[int]]:
        from llama_train.on_ranks import OnRanks

        shape = model_config(
            config.model, vocab_size=300, sequence_length=config.data.sequence_length, bos_id=None, eos_id=None
        )
        trainer = OnRanks(config, shape, World(Process(rank, ranks), torch.device("cpu")))
        rows = training_rows(data, config.data, config.seed)
        found, counts = [], []
        for batch in map(trainer.share, rows.micro_batches(7, 1, 2, trainer.part, trainer.parts)):
            assert batch.positions is not None
            assert batch.documents is not None
            counts.append(batch.count)
            columns = (batch.tokens, batch.targets, batch.positions, batch.documents)
            found += list(zip(*(column.flatten().tolist() for column in columns), strict=True))
        return found, counts

    results = run_ranks(work, ranks, timeout=120)
    found = sorted(values for values, _ in results for values in values)
    assert [values for values in found if values[3] != -1] == sorted(total)
    assert all(values[1] == IGNORED for values in found if values[3] == -1)  # what a row was filled up with
    counted = sum(batch.count for batch in batches)
    assert sum(sum(counts) for _, counts in results) == 2 * counted  # each of two ranks counts the whole rows
