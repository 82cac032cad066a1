from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_core import Llama, load_model, load_tokenizer
from llama_train import export
from llama_train.config import TrainConfig
from llama_train.export import export_model
from llama_train.prepare import prepare


def test_an_export_is_replaced_only_by_a_whole_one(
    tiny: TrainConfig, tmp_path: Path, t0: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(prepare(tiny.data, tmp_path / "data").tokenizer)
    tokens, target = torch.tensor([[1, 2, 3]]), tmp_path / "hf"
    first, second = (t0(seed, vocab_size=300, bos_token_id=298, eos_token_id=299) for seed in (0, 1))
    export_model(first, tokenizer, target)
    torch.testing.assert_close(load_model(target)(tokens), first(tokens), rtol=0, atol=0)
    assert load_tokenizer(target).encode("def") == tokenizer.encode("def")

    def full(*arguments: object, **keys: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "save_model", full)
        with pytest.raises(OSError, match="No space"):
            export_model(second, tokenizer, target)
    torch.testing.assert_close(load_model(target)(tokens), first(tokens), rtol=0, atol=0)
    (tmp_path / "hf.new").mkdir(exist_ok=True)  # left by an export that was killed
    export_model(second, tokenizer, target)
    torch.testing.assert_close(load_model(target)(tokens), second(tokens), rtol=0, atol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "hf"]
