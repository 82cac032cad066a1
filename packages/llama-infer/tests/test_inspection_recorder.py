"""What the recorder says of a pass, against counts made by hand and against the model without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llama_core import Llama
from llama_infer.inspection import Recorder

TOKENS = torch.tensor([[256, 5, 9, 2, 77]])
LAYER = [
    *("input_layernorm", "q_proj", "k_proj", "v_proj", "rope", "attend", "o_proj"),
    *("post_attention_layernorm", "gate_proj", "up_proj", "swiglu", "down_proj"),
]


def recorded(make_model: Callable[..., Llama], **changes: object) -> tuple[Llama, Recorder]:
    recorder = Recorder(keep=1)
    plain = make_model(**changes)
    model = Llama(plain.config, recorder.ops).eval().requires_grad_(False)
    model.load_state_dict(plain.state_dict())
    with recorder.recording(model):
        logits = model.logits(model(TOKENS, attend=recorder.attend))
    assert torch.equal(logits, plain.logits(plain(TOKENS)))
    return plain, recorder


def test_every_operation_is_there_in_order(make_model: Callable[..., Llama]) -> None:
    _, recorder = recorded(make_model, tie_word_embeddings=True)
    assert [o.name for o in recorder.operations] == ["embed_tokens", *LAYER, *LAYER, "norm", "lm_head"]
    assert [o.layer for o in recorder.operations] == [None, *[0] * 12, *[1] * 12, None, None]
    assert all(o.seconds >= 0 for o in recorder.operations)
    # A layer's own time holds that of its operations.
    for index, seconds in enumerate(recorder.layer_seconds):
        assert seconds >= sum(o.seconds for o in recorder.operations if o.layer == index)


def test_counts_equal_the_formulas(make_model: Callable[..., Llama]) -> None:
    _, recorder = recorded(make_model)
    operations = {o.name: o for o in recorder.operations if o.layer in (None, 0)}
    q = operations["q_proj"]
    assert (q.inputs, q.output) == (((1, 5, 32), (32, 32)), (1, 5, 32))
    assert (q.flops, q.read, q.written) == (2 * 5 * 32 * 32, 4 * (5 * 32 + 32 * 32), 4 * 5 * 32)
    assert operations["k_proj"].output == (1, 5, 16)
    assert operations["down_proj"].flops == 2 * 5 * 64 * 32
    assert operations["lm_head"].flops == 2 * 5 * 32 * 272
    # 15 pairs of a token and one before it (or itself), 4 heads of width 8
    assert operations["attend"].flops == 15 * 4 * (4 * 8 + 6)
    assert operations["attend"].inputs == ((1, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    assert operations["embed_tokens"].written == 4 * 5 * 32


def test_biases_are_counted(make_model: Callable[..., Llama]) -> None:
    _, recorder = recorded(make_model, attention_bias=True)
    q = next(o for o in recorder.operations if o.name == "q_proj")
    assert q.flops == 5 * (2 * 32 * 32 + 32)
    assert q.inputs == ((1, 5, 32), (32, 32), (32,))


def test_the_stream_and_the_kept_layer(make_model: Callable[..., Llama]) -> None:
    plain, recorder = recorded(make_model)
    norm = plain.model.norm
    assert norm is not None
    assert torch.equal(norm(recorder.hidden[-1]), plain(TOKENS))
    assert [h.shape for h in recorder.hidden] == [(1, 5, 32)] * 2
    seen = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen[layer] = (q, k, v)
        return plain.attend(layer, q, k, v)

    plain(TOKENS, attend=attend)
    assert recorder.kept is not None
    for kept, expected in zip(recorder.kept, seen[1], strict=True):
        assert torch.equal(kept, expected)


def test_the_model_is_left_as_it_was(make_model: Callable[..., Llama]) -> None:
    recorder = Recorder()
    model = Llama(make_model().config, recorder.ops)
    with recorder.recording(model):
        pass
    count = len(recorder.operations)
    model.logits(model(TOKENS)[:, :0])
    assert not recorder.hidden
    assert {o.name for o in recorder.operations[count:]}.isdisjoint({"q_proj", "embed_tokens", "lm_head"})


def test_other_operations_and_layers_are_refused(make_model: Callable[..., Llama]) -> None:
    with pytest.raises(ValueError, match="build it with this recorder's `ops`"), Recorder().recording(make_model()):
        pass
    recorder = Recorder(keep=2)
    model = Llama(make_model().config, recorder.ops)
    with pytest.raises(ValueError, match="layer is 2; the model's are 0 to 1"), recorder.recording(model):
        pass
