"""`llama-train prepare`: every kind of input, odd ones, and stops in the middle."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_core import Tokenizer, load_tokenizer
from llama_train.cli import main
from llama_train.data import shard as shard_module
from llama_train.data.inputs import find_inputs
from llama_train.data.items import read_items
from llama_train.data.make_shards import Totals, make_shards
from llama_train.data.prepared_folder import locked
from llama_train.data.settings import PrepareConfig
from llama_train.data.shard import Shard, read_shard, verify_shard
from llama_train.tokenizer_training import save_tokenizer, train_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["def f(x):\n    return x\n", "one two three\n" * 5], 262), folder, 10**30)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def make(tokenizer_folder: Path, tmp_path: Path) -> Callable[..., tuple[Totals, list[Shard]]]:
    def run(*inputs: object, **settings: Any) -> tuple[Totals, list[Shard]]:
        output = settings.pop("output", tmp_path / "out")
        note = settings.pop("note", lambda text: None)
        names = tuple(map(str, inputs))
        values = {"workers": 0, **settings}
        totals = make_shards(PrepareConfig(str(tokenizer_folder), str(output), names, **values), note)
        shards = [read_shard(path) for path in sorted(Path(output).glob("shard-*.tokens"))]
        for shard in shards:
            verify_shard(shard.path)
        return totals, shards

    return run


def documents(shards: list[Shard]) -> list[list[int]]:
    return [
        shard.tokens[start:end].tolist()
        for shard in shards
        for start, end in zip([0, *shard.ends[:-1].tolist()], shard.ends.tolist())
    ]


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_document_is_begin_text_end(make: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = ["one two", "def f(x):", "é文 <|end_of_text|>"]
    totals, shards = make(lines(tmp_path / "a.jsonl", *({"text": text} for text in texts)))
    assert documents(shards) == [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    assert shards[0].tokens.dtype == np.uint16
    assert shards[0].tokenizer == tokenizer.fingerprint
    assert shards[0].bytes.tolist() == [len(text.encode()) for text in texts]
    assert totals == Totals(1, 3, len(shards[0].tokens), sum(len(text.encode()) for text in texts), 0)
    assert shards[0].counted is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one\ntwo", "one\ntwo"),  # no newline at the end
        (b"one\r\ntwo\r\n", "one\ntwo\n"),
        (b"\xef\xbb\xbfone\n", "one\n"),
        (b"one", "one"),
        (b"\n", "\n"),
    ],
)
def test_odd_text_files(content: bytes, expected: str, make: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "empty.txt").touch()
    _, shards = make(tmp_path / "empty.txt", tmp_path / "a.txt")
    assert documents(shards) == [[*tokenizer.encode(expected), tokenizer.eos_id]]


def test_documents_of_a_text_file(make: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n\nthree\n#\nfour\n", encoding="utf-8")
    for settings, expected in (
        ({"document": "line"}, ["one", "two", "three", "#", "four"]),
        ({"document": "paragraph"}, ["one\ntwo\n", "three\n#\nfour\n"]),
        ({"document": "paragraph", "separator": "#"}, ["one\ntwo\n", "three\n", "four\n"]),
        ({"separator": "#"}, ["one\ntwo\n\n\nthree\n", "four\n"]),
    ):
        _, shards = make(
            path, output=tmp_path / f"out{len(expected)}{len(settings)}{settings.get('document')}", **settings
        )
        assert documents(shards) == [[*tokenizer.encode(text), tokenizer.eos_id] for text in expected]


def test_a_long_text_in_pieces_is_the_same(
    make: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"one {n}\n    two, three.\n\n" for n in range(50))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr("llama_train.data.items.PIECE", 64)
    config = PrepareConfig("t", "o", (str(tmp_path / "a.txt"),))
    (source,) = find_inputs(config)
    assert len(list(read_items(source, 0, config))) > 10
    _, shards = make(tmp_path / "a.txt")
    assert documents(shards) == [[*tokenizer.encode(text), tokenizer.eos_id]]


def test_a_huge_line(make: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "one two " * 100_000
    _, shards = make(lines(tmp_path / "a.jsonl", {"text": text}, {"text": "one"}))
    assert len(documents(shards)) == 2
    assert tokenizer.decode(documents(shards)[0]) == text


def test_prompts_and_assistant_turns_alone_are_targets(make: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Mixed schemas, and B30 (5): what is learnt of a chat is the answer."""
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}] * 2
    path = lines(
        tmp_path / "a.jsonl",
        {"prompt": "one ", "completion": "two"},
        {"messages": chat, "text": "not this"},
        {"text": "three", "other": [{"nested": 1}]},
    )
    _, (shard,) = make(path)
    prompt, messages, text = documents([shard])
    counted = shard.counts(0, len(shard.tokens)).tolist()
    before = tokenizer.encode("one ")
    assert prompt == [*before, *tokenizer.encode("two", add_bos=False), tokenizer.eos_id]
    assert counted[: len(prompt)] == [False] * len(before) + [True] * (len(prompt) - len(before))
    ids, mask = tokenizer.encode_chat_with_mask(chat)
    assert messages == ids
    assert counted[len(prompt) : len(prompt) + len(ids)] == mask
    assert 0 < sum(mask) < len(mask)
    assert counted[-len(text) :] == [True] * len(text)
    assert shard.bytes[0] == 3


def test_counts_of_any_part_of_the_mask() -> None:
    bits = np.random.default_rng(0).random(37) < 0.5
    empty = np.empty(0, np.uint64)
    packed = np.packbits(bits, bitorder="little")
    shard = Shard(Path(), np.zeros(37, np.uint16), empty, empty, packed, 5, "", {})
    for start in range(37):
        for stop in range(start, 38):
            assert shard.counts(start, stop).tolist() == bits[start:stop].tolist()


BAD = [
    (b'{"text": "a"', "it is not JSON"),
    (b"[1]", "must be an object with keys"),
    (b'{"txt": "a"}', "no key 'text'; its keys are 'txt'"),
    (b'{"text": 3}', "'text' is 3; it must be text"),
    (b'{"text": "\\ud800"}', "surrogate"),
    (b'{"text": "\xff"}', "not UTF-8: byte 0xff"),
    (b'{"messages": []}', "messages is empty"),
    (b'{"messages": [{"role": 1}]}', "needs a 'role' that is text"),
    (b'{"prompt": "a", "completion": null}', "'completion' is None"),
    (b"[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named_and_fatal_or_skipped(line: bytes, message: str, make: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    with pytest.raises(ValueError, match=message) as caught:
        make(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    notes: list[str] = []
    totals, _ = make(path, on_bad_line="skip", note=notes.append)  # the same folder goes on
    assert (totals.documents, totals.skipped) == (2, 1)
    assert notes[0].startswith(f"skipped    {path}:3: ")


def test_nested_key_empty_documents_and_the_limit(make: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"a": {"b": text}} for text in ("one", "", "two", "three")))
    totals, shards = make(path, text_key="a.b", limit=2, bos="no", eos="no")
    assert totals.documents == len(documents(shards)) == 2


def test_no_document(make: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match="no document was found in"):
        make(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="there is no such file or folder"):
        make(tmp_path / "none-*.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"holds no file whose name ends in .*\.jsonl"):
        make(tmp_path / "folder")


def test_compressed_globs_and_standard_input_are_the_same(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = lines(tmp_path / "a.jsonl", *({"text": f"one {n}"} for n in range(30)))
    data = plain.read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data[:100]) + gzip.compress(data[100:]))
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "c.jsonl.zst").write_bytes(compress(data[:100]) + compress(data[100:]))
    _, expected = make(plain)
    for name in ("b.jsonl.gz", "c.jsonl.zst", "*.gz"):
        _, shards = make(tmp_path / name, output=tmp_path / f"out-{name[0]}")
        assert documents(shards) == documents(expected)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    _, shards = make("-", format="jsonl", output=tmp_path / "stdin")
    assert documents(shards) == documents(expected)
    for name in ("b.jsonl.gz", "c.jsonl.zst"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-9])
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            make(tmp_path / name, output=tmp_path / f"cut-{name[0]}")


def test_parquet(make: Any, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [{"text": f"one {n}"} for n in range(700)]
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=300)
    _, shards = make(tmp_path / "a.parquet", shard_tokens=1000)
    _, expected = make(lines(tmp_path / "a.jsonl", *records), output=tmp_path / "out2", shard_tokens=1000)
    assert documents(shards) == documents(expected)
    for path in (tmp_path / "out").glob("shard-*"):
        if path.name > "shard-00000.tokens":
            path.unlink()
    (tmp_path / "out" / "index.json").unlink()
    _, again = make(tmp_path / "a.parquet", shard_tokens=1000)
    assert documents(again) == documents(expected)
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read as Parquet"):
        make(tmp_path / "b.parquet", output=tmp_path / "out3")


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "plan.json"}


def test_every_place_to_stop_leads_to_the_same_bytes(make: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"one {n}\ntwo" for n in range(40)), encoding="utf-8")
    lines(tmp_path / "b.jsonl", *({"text": f"three {n}"} for n in range(40)))
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write("bad\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("\n\n".join(f"x {n}" for n in range(40)).encode()))
    settings = {"shard_tokens": 100, "document": "paragraph", "on_bad_line": "skip"}
    inputs = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt.gz")]
    totals, _ = make(*inputs, **settings)
    assert totals.shards > 8
    assert totals.documents == 120
    whole = _files(tmp_path / "out")
    for kept in range(totals.shards):
        (tmp_path / "out" / "index.json").unlink()
        for number in range(kept, totals.shards):
            (tmp_path / "out" / f"shard-{number:05d}.tokens").unlink()
        (tmp_path / "out" / f".shard-{kept:05d}.tokens.tmp").write_bytes(b"half")
        assert make(*inputs, **settings)[0] == totals
        assert _files(tmp_path / "out") == whole


def test_kill_9_in_the_middle(make: Any, tokenizer_folder: Path, tmp_path: Path) -> None:
    """Real processes, killed while shards appear; the pool ends with them; then the rest is made."""
    path = lines(tmp_path / "a.jsonl", *({"text": f"one two three {n} " * 40} for n in range(1500)))
    output = tmp_path / "killed"
    command = [sys.executable, "-m", "llama_train", "prepare", str(path), "--tokenizer", str(tokenizer_folder)]
    command += ["--output", str(output), "--shard-tokens", "4000", "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (output / "shard-00002.tokens").exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        until = time.monotonic() + 30  # the processes it started notice
        while time.monotonic() < until and _alive(process.pid):
            time.sleep(0.05)
        assert not _alive(process.pid)
    assert not (output / "index.json").exists()
    make(path, output=output, shard_tokens=4000)
    make(path, shard_tokens=4000)
    assert _files(output) == _files(tmp_path / "out")


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_another_preparation_is_not_continued(make: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    totals, _ = make(path)
    notes: list[str] = []
    assert make(path, note=notes.append)[0] == totals
    assert notes[0].startswith("complete")
    with pytest.raises(ValueError, match=r"begun otherwise.*text_key was 'text', is 'other'"):
        make(path, text_key="other")
    lines(path, {"text": "another"})
    with pytest.raises(ValueError, match="the inputs are not the same files"):
        make(path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(ValueError, match="holds other files"):
        make(path, output=tmp_path / "mine")


def test_a_full_disk_keeps_the_finished_shards(
    make: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": f"one {n}"} for n in range(60)))
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 3:  # plan.json and two shards
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(shard_module.os, "fsync", full)
    output = tmp_path / "out"
    command = ["prepare", str(path), "--tokenizer", str(tokenizer_folder), "--output", str(output)]
    assert main([*command, "--shard-tokens", "100", "--workers", "0"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "llama-train: No space left on device"
    assert sorted(p.name for p in output.iterdir() if p.is_file()) == [
        ".lock", "plan.json", "shard-00000.tokens", "shard-00001.tokens",
    ]  # fmt: skip
    monkeypatch.undo()
    assert make(path, shard_tokens=100)[0].documents == 60


def test_damaged_shards(make: Any, tmp_path: Path) -> None:
    make(lines(tmp_path / "a.jsonl", {"text": "one two three " * 50}))
    path = tmp_path / "out" / "shard-00000.tokens"
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    with pytest.raises(ValueError, match="not a whole token shard"):
        read_shard(path)
    path.write_bytes(whole.replace(b"LLTOKENS", b"LLTOKENX"))
    with pytest.raises(ValueError, match="it is no token shard"):
        read_shard(path)
    path.write_bytes(whole[:8] + b"\x09" + whole[9:])
    with pytest.raises(ValueError, match="format version 9; this program reads 1"):
        read_shard(path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    read_shard(path)
    with pytest.raises(ValueError, match="is damaged: its checksum"):
        verify_shard(path)


def test_wide_ids_and_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    ids, ends, sizes = np.array([1, 70_000], np.uint32), np.array([2]), np.array([5])
    shard_module.write_shard(tmp_path / "s", ids, ends, sizes, None, vocab_size=70_001, tokenizer="t")
    assert read_shard(tmp_path / "s").tokens.dtype == np.uint32
    with pytest.raises(ValueError, match="token id 70000 is outside the vocabulary of 70000"):
        shard_module.write_shard(tmp_path / "s", ids, ends, sizes, None, vocab_size=70_000, tokenizer="t")


def test_two_at_once_are_refused(make: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "one"})
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out" / ".lock"), pytest.raises(ValueError, match="in use by another process"):
        make(path)
