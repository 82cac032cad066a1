"""`llama-train init`: the file holds every key, reads back, and trains; sums by hand; nothing is replaced or stored."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from llama_core import LlamaConfig, init_weights, preset, save_model
from llama_core.model import Llama
from llama_parallel import ParallelConfig
from llama_parallel.planner import Work, predict_memory
from llama_train import load_config
from llama_train.cli import main
from llama_train.config import TrainConfig
from llama_train.manage.commented_toml import commented_toml, field_help
from llama_train.manage.new_run import accumulation_of, planned_work


def _keys(cls: type, section: str = "") -> list[str]:
    found = []
    for name, hint in get_type_hints(cls).items():
        found += _keys(hint, f"{section}{name}.") if is_dataclass(hint) else [section + name]  # type: ignore[arg-type]
    return found


def _keys_shown(text: str) -> list[str]:
    section, found = "", []
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[([\w.]+)\]", line):
            section = heading[1] + "."
        elif key := re.match(r"(?:# )?([a-z]\w*) = ", line):
            found.append(section + key[1])
    return found


def test_every_key_stands_there_once_and_defaults_are_comments(tiny: TrainConfig) -> None:
    text = commented_toml(tiny, "Heading\n  of two lines")
    assert text.startswith("# Heading\n#   of two lines\n\n")
    assert sorted(_keys_shown(text)) == sorted(_keys(TrainConfig))
    assert max(map(len, text.splitlines())) <= 120
    from llama_train.config_file import from_mapping

    assert from_mapping(TrainConfig, tomllib.loads(text)) == tiny
    assert tomllib.loads(commented_toml(TrainConfig(), "")) == {section: {} for section in _sections(TrainConfig)}


def _sections(cls: type) -> list[str]:
    return [name for name, hint in get_type_hints(cls).items() if is_dataclass(hint)]


def test_comments_that_hold_a_value_are_the_defaults(tiny: TrainConfig) -> None:
    """Taking away the mark changes nothing."""
    text = commented_toml(TrainConfig(), "")
    live = re.sub(r"(?m)^# ([a-z]\w* = (?!<|\[<|\"\.\.\.\"|\[\"\.\.\.\").*)$", r"\1", text)
    assert tomllib.loads(live)["optimizer"]["betas"] == [0.9, 0.95]
    from llama_train.config_file import from_mapping

    assert from_mapping(TrainConfig, tomllib.loads(live)) == TrainConfig()


def test_every_key_has_help() -> None:
    def check(cls: type) -> None:
        texts, hints = field_help(cls), get_type_hints(cls)
        for item in fields(cls):  # type: ignore[arg-type]
            if is_dataclass(hints[item.name]):
                check(hints[item.name])
            else:
                assert texts[item.name], f"{cls.__name__}.{item.name}"

    check(TrainConfig)


def test_the_sums_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.toml"
    flags = "--model smollm2-135m --num-hidden-layers 12 --dp 4 --global-batch 64 --micro-batch 2 --seq 1024 --steps 50"
    assert main(["init", *flags.split(), str(path)]) == 0
    out = capsys.readouterr().out
    # 64 rows = 2 × 8 × 4; 65,536 tokens; 10⁹ / 65,536 = 15,258.8
    assert "2 rows × 8 accumulated × 4 data-parallel = 64 rows of 1024 tokens = 65.54K tokens a step" in out
    assert "50 steps = 3.28M tokens; a billion tokens are 15,259 steps" in out
    assert f"torchrun --nproc-per-node 4 -m llama_train run {path}" in out
    config = load_config(path)
    assert (config.model.preset, config.model.num_hidden_layers) == ("smollm2-135m", 12)
    assert (config.parallel.dp_shard, config.data.gradient_accumulation_steps, config.schedule.warmup_steps) == (
        4,
        8,
        5,
    )
    shape = preset("smollm2-135m").replace(num_hidden_layers=12, vocab_size=2048)
    work = Work(shape, ParallelConfig(dp_shard=4), 1024, 64, micro_batch=2, precision="mixed")
    assert planned_work(config, shape) == work
    assert f"{predict_memory(work).total / 1e9:.2f} GB a GPU (predicted)" in out


def test_the_written_file_trains(tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = f"--model tiny --device cpu --seq 16 --vocab-size 300 --steps 3 --micro-batch 2 --source {text_folder}"
    assert main(["init", *flags.split(), "mine.toml"]) == 0
    assert main(["run", "mine.toml"]) == 0
    assert (tmp_path / "runs" / "mine" / "hf" / "model.safetensors").is_file()


@pytest.fixture
def stored(tmp_path: Path, text_folder: Path) -> Path:
    """A small model with its tokenizer."""
    from llama_train.tokenizer_training import save_tokenizer, train_tokenizer

    path = tmp_path / "stored"
    tokenizer = train_tokenizer([file.read_text(encoding="utf-8") for file in text_folder.iterdir()], 300)
    model = Llama(LlamaConfig(300, 32, 48, 2, 4, num_key_value_heads=2, max_position_embeddings=64))
    init_weights(model, 0)
    save_model(model, path)
    save_tokenizer(tokenizer, path, 64)
    return path


def test_a_model_that_is_stored(
    stored: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--model", str(stored), "--device", "cpu", "--steps", "2", "--source", str(text_folder)]
    assert main(["init", *flags, "tune.toml"]) == 0
    config = load_config("tune.toml")
    assert (config.model.start_from, config.data.sequence_length) == (str(stored), 64)
    assert (
        main(["init", *flags, "--from-scratch", "--num-attention-heads", "2", "--num-hidden-layers", "1", "new.toml"])
        == 0
    )
    config = load_config("new.toml")
    model = config.model
    assert (model.start_from, model.hidden_size, model.num_hidden_layers, model.num_attention_heads) == (None, 32, 1, 2)
    assert (model.num_key_value_heads, model.head_dim, config.data.tokenizer) == (None, None, str(stored))
    for name in ("tune", "new"):
        assert main(["run", f"{name}.toml"]) == 0


def test_nothing_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("mine", encoding="utf-8")
    assert main(["init", "--model", "tiny", "a.toml"]) == 2
    assert "a.toml exists, and is left as it is: give another name" in capsys.readouterr().err
    assert (tmp_path / "a.toml").read_text(encoding="utf-8") == "mine"
    (tmp_path / "runs" / "b").mkdir(parents=True)
    (tmp_path / "runs" / "b" / "precious").touch()
    assert main(["init", "--model", "tiny", "--seq", "16", "b.toml"]) == 0
    assert "runs/b exists: the run goes on there if it is the same" in capsys.readouterr().out
    assert (tmp_path / "runs" / "b" / "precious").exists()


def test_no_token_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN": "hf_" + "t" * 34, "WANDB_API_KEY": "k" * 40}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    assert main(["init", "--model", "tiny", "--seq", "16", str(tmp_path / "a.toml")]) == 0
    text = (tmp_path / "a.toml").read_text(encoding="utf-8")
    assert not any(value in text for value in secrets.values())
    assert not any("token" in key.split("_") or "api" in key for key in _keys(TrainConfig))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model llama-3-8b --dp 2 --tp 3", "32 attention heads do not divide over tp 3"),
        ("--model llama-3-8b --dp 2 --tp 3", "layouts of 6 processes that work: tp 2 pp 3"),
        ("--model smolm2-135m", "did you mean 'smollm2-135m'"),
        ("--model tiny --dp 8 --micro-batch 3 --global-batch 100", "must be a multiple of 24, such as 96 or 120"),
        ("--model tiny --global-batch 8 --accumulation 2", "give one of them"),
        ("--model tiny --steps 5 --tokens 5", "one of them says when to stop"),
        ("--model tiny --dp 0", "--dp is 0; it must be at least 1"),
        ("--model tiny --seq 1", "--seq is 1; it must be at least 2"),
        ("--model {stored} --num-hidden-layers 1", "--num-hidden-layers: the weights of"),
    ],
)
def test_mistakes(flags: str, message: str, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.toml"
    try:
        status = main(["init", *flags.format(stored=stored).split(), str(path)])
    except SystemExit as error:  # tyro's own way out
        status = int(str(error.code))
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not path.exists()


def test_accumulation() -> None:
    assert accumulation_of(64, 2, 4) == 8
    with pytest.raises(ValueError, match=r"such as 8$"):
        accumulation_of(4, 2, 4)


def test_precision_follows_what_the_run_would_do(tiny: TrainConfig, change: Callable[..., Any]) -> None:
    shape = preset("tiny")
    resolved = change(tiny, **{"parallel.dp_shard": 1})
    assert planned_work(resolved, shape).precision == "float32"
    gpu = change(resolved, device="cuda", dtype="bfloat16")
    assert (planned_work(gpu, shape).precision, planned_work(gpu, shape).kernels) == ("master", True)
    assert planned_work(change(gpu, **{"parallel.tp": 2}), shape).precision == "mixed"
    assert planned_work(change(gpu, **{"optimizer.master_weights": False}), shape).precision == "bfloat16"
