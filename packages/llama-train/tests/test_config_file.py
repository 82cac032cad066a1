from __future__ import annotations

from pathlib import Path

import pytest

from llama_train import TrainConfig, load_config
from llama_train.config import DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig
from llama_train.config_file import dump_config


def _read(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_reads_what_is_written(tmp_path: Path) -> None:
    config = _read(
        tmp_path,
        'name = "a"\nseed = 3\n[model]\npreset = "tiny"\ntie_word_embeddings = true\n'
        '[optimizer]\nlearning_rate = 1\nbetas = [0.8, 0.99]\n[data]\nsuffixes = [".a", ".b", ".c"]\n',
    )
    assert config == TrainConfig(
        name="a",
        seed=3,
        model=ModelConfig(preset="tiny", tie_word_embeddings=True),
        optimizer=OptimizerConfig(learning_rate=1.0, betas=(0.8, 0.99)),
        data=DataConfig(suffixes=(".a", ".b", ".c")),
    )
    assert isinstance(config.optimizer.learning_rate, float)  # the 1 of the file


def test_round_trip(tmp_path: Path) -> None:
    config = TrainConfig(
        name="naïve 文",
        folder='quo"te back\\slash\ttab\x7f',
        model=ModelConfig(hidden_size=8, rope_theta=1e6),
        optimizer=OptimizerConfig(learning_rate=1e-05, eps=1e-10),
    )
    assert _read(tmp_path, dump_config(config)) == config
    assert _read(tmp_path, dump_config(TrainConfig())) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[optimizer]\nlearnin_rate = 1\n",
            r"unknown key 'learnin_rate' in \[optimizer\]; did you mean optimizer\.",
        ),
        ("learning_rate = 1\n", "unknown key 'learning_rate' at the top level; did you mean optimizer.learning_rate"),
        ("[data]\nwarmup_steps = 1\n", r"'warmup_steps' in \[data\]; did you mean schedule.warmup_steps"),
        ("[optimiser]\n", "unknown key 'optimiser' at the top level; did you mean optimizer"),
        ("[schedule]\nzzzz = 1\n", "the keys there are steps, tokens, shape, warmup_steps, final_ratio"),
        ("[optimizer]\nlearning_rate = '1e-3'\n", "optimizer.learning_rate is '1e-3'; it must be a number"),
        ("[schedule]\nsteps = 1.5\n", "schedule.steps is 1.5; it must be a whole number"),
        ("[schedule]\nsteps = true\n", "schedule.steps is True; it must be a whole number"),
        ("compile = 1\n", "compile is 1; it must be true or false"),
        ("device = 'tpu'\n", "device is 'tpu'; it must be one of 'auto', 'cpu', 'cuda'"),
        ("[optimizer]\nbetas = [0.9]\n", r"betas is \[0.9\]; it must be a list of 2"),
        ("[optimizer]\nbetas = [0.9, 'a']\n", r"betas\[1\] is 'a'; it must be a number"),
        ("[data]\nsuffixes = '.py'\n", "suffixes is '.py'; it must be a list"),
        ("model = 3\n", r"model is 3; it is a section: write \[model\]"),
        ("[schedule]\nsteps = -1\n", "schedule.steps is -1; it must be at least 1"),
        ("[schedule\n", "run.toml is not valid TOML"),
    ],
)
def test_faults_are_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _read(tmp_path, text)
    assert "run.toml" in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="cannot be read"):
        load_config(tmp_path)


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b'\xef\xbb\xbfname = "q"\r\nseed = 3\r\n')
    assert (load_config(path).name, load_config(path).seed) == ("q", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"[optimizer]\neps = 1{'0' * 400}",
            "optimizer.eps is a whole number of 401 digits; that is beyond every float",
        ),
        (f"seed = 1{'0' * 5000}", "c.toml is not valid TOML: Exceeds the limit"),
        ('name = "a\\u0000b"', r"c.toml: name is 'a\\x00b'; it must be UTF-8 text without NUL"),
        ('folder = "a\\u0000b"', "c.toml: folder is"),
    ],
)
def test_values_that_nothing_can_hold(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_text_from_a_command_line_that_is_not_utf8() -> None:
    with pytest.raises(ValueError, match=r"evaluation.sample_prompt is '\\udcff'; it must be UTF-8"):
        EvaluationConfig(sample_prompt="\udcff")
    with pytest.raises(ValueError, match=r"data.vocab_size is 2147483648; it must be 258 to 1048576"):
        DataConfig(vocab_size=2**31)  # tokenizers reserves memory for all of it, and aborts the process
