from __future__ import annotations

from pathlib import Path

import pytest

from llama_train.corpus import Document, read_corpus, split_held_out


def test_standard_library_is_sorted_text_without_tests() -> None:
    documents = read_corpus("stdlib", ())
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "idlelib", "site-packages", "encodings", "__pycache__"}
    assert sum(len(document.text) for document in documents) > 4_000_000


def test_folder_reads_only_the_suffixes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "sub/a.txt", "c.bin", "empty.txt"):
        (tmp_path / name).write_text("" if name == "empty.txt" else name, encoding="utf-8")
    assert read_corpus(str(tmp_path), (".txt",)) == [Document("b.txt", "b.txt"), Document("sub/a.txt", "sub/a.txt")]


def test_single_file(tmp_path: Path) -> None:
    (tmp_path / "x.anything").write_text("text", encoding="utf-8")
    assert read_corpus(str(tmp_path / "x.anything"), (".txt",)) == [Document("x.anything", "text")]


def test_faults(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        read_corpus(str(tmp_path / "none"), (".txt",))
    with pytest.raises(ValueError, match=r"no text in files ending in \.txt"):
        read_corpus(str(tmp_path), (".txt",))
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="byte 2 is 0xff"):
        read_corpus(str(tmp_path), (".txt",))


def test_held_out_files_are_disjoint_deterministic_and_of_the_size_asked() -> None:
    documents = [Document(f"{n}.txt", "x" * (100 + n)) for n in range(50)]
    train, held_out = split_held_out(documents, 0.1)
    assert sorted(train + held_out, key=lambda d: d.text) == documents
    assert not {d.name for d in train} & {d.name for d in held_out}
    size = sum(len(d.text) for d in held_out) / sum(len(d.text) for d in documents)
    assert abs(size - 0.1) < 0.02
    assert split_held_out(documents[::-1], 0.1)[1] == held_out[::-1]  # by name, not by place


def test_held_out_is_never_everything() -> None:
    documents = [Document("a", "x" * 1000), Document("b", "y")]
    for fraction in (0.001, 0.5, 0.999):
        train, held_out = split_held_out(documents, fraction)
        assert len(train) == len(held_out) == 1


def test_one_document_is_cut_at_a_line_near_its_end() -> None:
    text = "".join(f"line {n}\n" for n in range(100))
    (train,), (held_out,) = split_held_out([Document("a", text)], 0.1)
    assert train.text + held_out.text == text
    assert train.text.endswith("\n")
    assert 0.08 < len(held_out.text) / len(text) < 0.13
    (train,), (held_out,) = split_held_out([Document("a", "xyz")], 0.1)
    assert (train.text, held_out.text) == ("xy", "z")
    with pytest.raises(ValueError, match="holds 1 characters"):
        split_held_out([Document("a", "x")], 0.1)
