from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llama_train.tokens import read_tokens, write_tokens


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_round_trip_in_the_narrowest_type(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    path = tmp_path / "t.npy"
    assert write_tokens(path, iter([[1, 2], [], [vocab_size - 1]]), vocab_size) == 3
    tokens = read_tokens(path)
    assert tokens.dtype == dtype
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == [1, 2, vocab_size - 1]
    assert [p.name for p in tmp_path.iterdir()] == ["t.npy"]


def test_an_id_beyond_the_width_is_an_error_not_a_wrap(tmp_path: Path) -> None:
    with pytest.raises(OverflowError):
        write_tokens(tmp_path / "t.npy", [[2**16]], 2**16)


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    write_tokens(path, [[1] * 100], 300)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a whole token file"):
        read_tokens(path)
    np.save(path, np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="2-dimensional float32"):
        read_tokens(path)
    with pytest.raises(ValueError, match="not a whole token file"):
        read_tokens(tmp_path / "none.npy")
