"""Text to train on: Python's own standard library, or the user's files; and its held-out part, by whole files."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Tests repeat themselves, and generated tables (encodings, pydoc_data) are no prose: a held-out table would be
# predicted from its near copy in the training part, and the held-out loss would flatter.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "idlelib",
        "lib-dynload",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)


@dataclass(frozen=True)
class Document:
    """One file: its name relative to the source, with forward slashes, and its text."""

    name: str
    text: str


def read_corpus(source: str, suffixes: Sequence[str]) -> list[Document]:
    """All documents of a source, in the order of their names.

    Args:
        source: "stdlib", a text file, or a folder that is searched through.
        suffixes: endings of the files of a folder that are read.

    Raises:
        ValueError: no such path, a file that is not UTF-8, or no text at all.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)]
    else:
        root = Path(source)
        if root.is_file():
            root, paths = root.parent, [root]
        elif root.is_dir():
            paths = [path for path in root.rglob("*") if path.is_file() and path.suffix in suffixes]
        else:
            raise ValueError(f"data.source is {source!r}; there is no such file or folder")
    documents = [_read(path, path.relative_to(root).as_posix()) for path in paths]
    documents = sorted((document for document in documents if document.text), key=lambda document: document.name)
    if not documents:
        endings = ".py" if source == "stdlib" else ", ".join(suffixes)
        raise ValueError(f"data.source is {source!r}; {root} holds no text in files ending in {endings}")
    return documents


def split_held_out(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Set whole documents apart until they hold `fraction` of the characters.

    Documents are taken in the order of their names' hashes, so the choice is random but always the same. A single
    document is cut near its end, at a line if it has one there.

    Returns:
        (training documents, held-out documents), neither empty, each in the order given.

    Raises:
        ValueError: too little text to divide.
    """
    if len(documents) == 1:
        return _cut(documents[0], fraction)
    wanted = fraction * sum(len(document.text) for document in documents)
    by_hash = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
    held_out: set[str] = set()
    size = 0
    for document in by_hash[:-1]:  # the last always trains
        # A document that would overshoot by more than the gap it fills is passed over, unless none was taken.
        if held_out and size + len(document.text) - wanted > wanted - size:
            continue
        held_out.add(document.name)
        size += len(document.text)
        if size >= wanted:
            break
    return (
        [document for document in documents if document.name not in held_out],
        [document for document in documents if document.name in held_out],
    )


def _cut(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    text = document.text
    if len(text) < 2:
        raise ValueError(f"{document.name} holds {len(text)} characters; a training and a held-out part need 2 or more")
    place = min(max(1, round(len(text) * (1 - fraction))), len(text) - 1)
    line = text.rfind("\n", len(text) // 2, place) + 1
    place = line or place
    return [Document(document.name, text[:place])], [Document(document.name + " (end)", text[place:])]


def _read(path: Path, name: str) -> Document:
    try:
        return Document(name, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
