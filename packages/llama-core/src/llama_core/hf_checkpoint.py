"""A Hugging Face folder: config.json beside one safetensors file, or several and an index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .compressed_tensors import KEY, rounded_tensors
from .config import LlamaConfig
from .errors import CheckpointError, listed
from .file_bytes import FileBytes
from .generation_config import read_json_object
from .safetensors_file import SafetensorsEntry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_hf(folder: Path) -> Checkpoint:
    """Read configuration, index and headers of a folder; no weights yet. Rounded weights are read as numbers.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
    """
    checkpoint = _open(folder)
    settings = checkpoint.config.extra.get(KEY)
    if settings is None:
        return checkpoint
    # The model that comes of it is not rounded, so what is said of the file is not said of the model.
    config = checkpoint.config.replace(extra={k: v for k, v in checkpoint.config.extra.items() if k != KEY})
    try:
        tensors = rounded_tensors(settings, checkpoint.tensors, str(folder))
    except CheckpointError:
        checkpoint.close()
        raise
    return replace(checkpoint, config=config, tensors=tensors)


def _open(folder: Path) -> Checkpoint:
    try:
        config = LlamaConfig.from_file(folder)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{folder / 'config.json'} is nested too deeply to be read") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if (folder / INDEX).is_file():
        return _open_sharded(folder, config)
    if not (folder / SINGLE).is_file():
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}{_what_else(folder)}")
    file = FileBytes(folder / SINGLE)
    try:
        entries, _ = read_header(file)
    except CheckpointError:
        file.close()
        raise
    return Checkpoint(folder, config, entries, files=(file,))


def _what_else(folder: Path) -> str:
    if shards := sorted(path.name for path in folder.glob("model-*-of-*.safetensors")):
        return f"; there are shards ({listed(shards, 3)}) but no index that says what they hold"
    if list(folder.glob("pytorch_model*.bin")):
        return "; there are pytorch_model .bin files: convert them to safetensors first"
    return ""


def _open_sharded(folder: Path, config: LlamaConfig) -> Checkpoint:
    weight_map = _read_index(folder / INDEX)
    names = sorted(set(weight_map.values()))
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder / INDEX} names {len(absent)} files that are not there: {listed(absent)}")
    files: list[FileBytes] = []
    faults: list[str] = []
    tensors: dict[str, SafetensorsEntry] = {}
    try:
        headers = {}
        for name in names:
            files.append(FileBytes(folder / name))
            headers[name], _ = read_header(files[-1])
        for name, shard in weight_map.items():
            if name in headers[shard]:
                tensors[name] = headers[shard][name]
        lost = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in headers[shard]]
        if lost:
            faults.append(f"{len(lost)} named by the index and not in their file: {listed(lost)}")
        loose = [f"{name} in {shard}" for shard, header in headers.items() for name in header if name not in weight_map]
        if loose:
            faults.append(f"{len(loose)} in a file and not in the index: {listed(loose)}")
    except CheckpointError:
        for file in files:
            file.close()
        raise
    return Checkpoint(folder, config, tensors, faults, files)


def _read_index(path: Path) -> dict[str, str]:
    index = read_json_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} must hold an object 'weight_map' of tensor name → file name")
    bad = [shard for shard in weight_map.values() if not _plain_name(shard)]
    if bad:
        raise CheckpointError(
            f"{path}: weight_map must name .safetensors files of the same folder, not {listed(bad, 3)}"
        )
    return weight_map


def _plain_name(shard: Any) -> bool:
    return isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\:\0")
