"""2,000 damaged files of each kind: every one loads or gives one ValueError that names it, and nothing else happens.

A test prints how many were tried, loaded, refused, and the longest time of one. Damage is drawn from a fixed seed.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import CheckpointError, Llama, LlamaConfig, load_model, save_model
from llama_core.gguf_file import read_gguf_header
from llama_core.lora import LoraConfig, adapter_of, apply_lora, load_adapter, save_adapter

FILES = 2000
SECONDS = 20.0
"""No single file may take longer. They take milliseconds; the rest is room for busy machines."""
MEGABYTES = 300
"""Peak memory of the process may grow by no more over all files of a kind; a believed count would take terabytes."""

NUMBERS = [0, 1, 2, 7, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63]
NUMBERS += [(1 << 64) - 1, (1 << 64) - 8]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**64,
    10**30,
    -(2**63),
    0.5,
    -1.5,
    1e308,
    "",
    "x",
    "../x",
    "9" * 50,
]
VALUES += [[], {}, [[]], [-1, 2], [0, 10**18], {"a": 1}, "F32", "nan", float("nan"), float("inf")]


def damage_bytes(data: bytes, draw: random.Random, front: int) -> bytes:
    """One or a few of: cut, flipped bits, numbers overwritten, bytes taken out or doubled. Mostly within `front`."""
    text = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(max(1, len(text) if draw.random() < 0.2 else min(front, len(text)))) if text else 0
        kind = draw.randrange(6)
        if kind == 0:
            del text[at:]
        elif kind == 1 and text:
            text[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            width = draw.choice((1, 2, 4, 8))
            text[at : at + width] = (draw.choice(NUMBERS) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif kind == 3:
            del text[at : at + draw.randrange(1, 40)]
        elif kind == 4:
            text[at:at] = text[at : at + draw.randrange(1, 40)]
        else:
            text[at:at] = draw.randbytes(draw.randrange(1, 16))
    return bytes(text)


def damage_json(value: Any, draw: random.Random) -> Any:
    """Another value, a key taken out, or a key added, somewhere in the tree."""
    value = copy.deepcopy(value)
    parents = [value]
    for parent in parents:
        children = parent.values() if isinstance(parent, dict) else parent
        parents += [child for child in children if isinstance(child, dict | list) and child]
    parent = draw.choice(parents)
    key = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    kind = draw.randrange(4)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[draw.choice(list(parent)) + draw.choice(("", "x", "."))] = draw.choice(VALUES)
    elif kind == 2 and isinstance(parent, dict):
        parent[key] = copy.deepcopy(parent[draw.choice(list(parent))])
    else:
        parent[key] = draw.choice(VALUES)
    return value


def damage_json_text(text: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return damage_bytes(text, draw, len(text))
    tree = json.loads(text)
    for _ in range(draw.choice((1, 1, 2))):
        tree = damage_json(tree, draw) if tree else tree
    return json.dumps(tree).encode()


def damage_header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file with a damaged JSON header and a right length before it."""
    if draw.random() < 0.5:
        return damage_bytes(data, draw, 8 + int.from_bytes(data[:8], "little"))
    length = int.from_bytes(data[:8], "little")
    header = damage_json_text(data[8 : 8 + length], draw)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def fuzz(
    path: Path, damage: Callable[[bytes, random.Random], bytes], load: Callable[[], Any], capsys: Any, kind: str
) -> None:
    whole = path.read_bytes()
    load()  # it is whole before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded, refused, longest = 0, 0, 0.0
    for index in range(FILES):
        path.write_bytes(damage(whole, random.Random(f"{kind} {index}")))
        start = time.perf_counter()
        try:
            load()
            loaded += 1
        except CheckpointError as error:
            refused += 1
            text = str(error)
            assert str(path) in text or str(path.parent) in text, f"{kind} {index}: names no file: {text}"
            assert len(text) < 5000, f"{kind} {index}: {len(text)} characters"
        except Exception as error:
            raise AssertionError(f"{kind} {index}: {type(error).__name__}: {error}") from error
        longest = max(longest, time.perf_counter() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    with capsys.disabled():
        print(
            f"\n  {kind}: {FILES} tried, {loaded} loaded, {refused} refused, longest {longest:.3f} s, +{grown:.0f} MB"
        )
    assert loaded + refused == FILES
    assert refused > FILES * 0.4  # the damage must be damage
    assert longest < SECONDS
    assert grown < MEGABYTES


def tiny() -> Llama:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attention_bias=False, eos_token_id=(2, 3),
    )  # fmt: skip
    return Llama(config)


def tokens(model: Llama) -> torch.Tensor:
    """What loads must also run: a configuration that passes and then fails in the model is not checked enough."""
    with torch.no_grad():
        return model.logits(model(torch.tensor([[1, 2, 3]])))


def test_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tiny(), tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    fuzz(path, damage_header, lambda: tokens(load_model(tmp_path / "m")), capsys, "safetensors")


def test_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tiny(), tmp_path / "m", max_shard_bytes=4000)
    path = tmp_path / "m" / "model.safetensors.index.json"
    names = sorted(p.name for p in (tmp_path / "m").iterdir())

    def damage(text: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.7:
            return damage_json_text(text, draw)
        index = json.loads(text)  # entries that point to other shards, to the index itself, or nowhere
        for _ in range(draw.choice((1, 3))):
            index["weight_map"][draw.choice(list(index["weight_map"]))] = draw.choice(
                [*names, ".", "..", "x.safetensors"]
            )
        return json.dumps(index).encode()

    fuzz(path, damage, lambda: tokens(load_model(tmp_path / "m")), capsys, "index")


def test_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tiny(), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    keep += ("num_key_value_heads", "rope_parameters", "tie_word_embeddings", "rms_norm_eps", "eos_token_id")
    path.write_text(json.dumps({key: config[key] for key in keep}))  # keys that matter, so that damage hits them
    fuzz(path, damage_json_text, lambda: tokens(load_model(tmp_path / "m")), capsys, "config.json")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = tmp_path / "m.gguf"
    save_model(tiny(), path, format="gguf", dtype=kind)
    front = min(tensor.offset for tensor in read_gguf_header(path).tensors.values())
    load = lambda: tokens(load_model(path, dtype=torch.float32))  # noqa: E731
    fuzz(path, lambda data, draw: damage_bytes(data, draw, front), load, capsys, f"GGUF {kind}")


def test_pth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tiny(), tmp_path / "m", format="meta")
    path = tmp_path / "m" / "consolidated.00.pth"
    fuzz(
        path, lambda data, draw: damage_bytes(data, draw, len(data)), lambda: load_model(tmp_path / "m"), capsys, "pth"
    )


def test_params(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tiny(), tmp_path / "m", format="meta")
    path = tmp_path / "m" / "params.json"
    fuzz(path, damage_json_text, lambda: tokens(load_model(tmp_path / "m")), capsys, "params.json")


def test_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, config = tiny(), LoraConfig(r=2)
    apply_lora(model, config)
    save_adapter(adapter_of(model, config), tmp_path / "m")

    def load() -> None:
        load_adapter(tmp_path / "m")

    fuzz(tmp_path / "m" / "adapter_model.safetensors", damage_header, load, capsys, "adapter")


def test_adapter_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, config = tiny(), LoraConfig(r=2, rank_pattern={"q_proj": 3}, alpha_pattern={"up_proj": 2})
    apply_lora(model, config)
    save_adapter(adapter_of(model, config), tmp_path / "m")
    path = tmp_path / "m" / "adapter_config.json"
    settings = {name: value for name, value in json.loads(path.read_text()).items() if value is not None}
    path.write_text(json.dumps(settings))

    def load() -> None:
        adapter = load_adapter(tmp_path / "m")
        with torch.device("meta"):  # shapes are all that can be wrong
            fresh = Llama(model.config)
        try:
            apply_lora(fresh, adapter)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error

    fuzz(path, damage_json_text, load, capsys, "adapter_config.json")
