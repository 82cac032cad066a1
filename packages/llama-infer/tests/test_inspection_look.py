"""A look at a tiny model: scores by the formula, the lens against the model's own answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llama_core import Llama, Tokenizer, plain_attend
from llama_infer.inspection import Look, Recorder, look
from llama_infer.inspection.look import head_scores

Make = Callable[..., Llama]


def see(make_model: Make, tokenizer: Tokenizer, prompt: str = "a bc\n", **options: object) -> Look:
    recorder = Recorder(keep=1)
    plain = make_model()
    model = Llama(plain.config, recorder.ops).eval().requires_grad_(False)
    model.load_state_dict(plain.state_dict())
    return look(model, recorder, tokenizer, prompt, **options)  # type: ignore[arg-type]


def test_shares_of_heads_give_what_attention_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, heads, 8, generator=generator) for heads in (6, 2, 2))
    expected = plain_attend(0, q[None], k[None], v[None])[0]
    for head in range(6):
        scores = head_scores(q, k, head)
        assert scores.kv_head == head // 3
        torch.testing.assert_close(scores.shares @ v[:, scores.kv_head], expected[:, head])
        assert torch.equal(scores.masked.isinf(), torch.ones(7, 7, dtype=torch.bool).triu(1))
        assert torch.equal(scores.raw.tril(), scores.masked.nan_to_num(neginf=0.0))


def test_long_prompts_show_their_last_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(100, heads, 8, generator=generator) for heads in (4, 2))
    scores = head_scores(q, k, 3)
    raw = q[:, 3] @ k[:, 1].T / 8**0.5
    shares = raw.masked_fill(torch.ones(100, 100, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    torch.testing.assert_close(scores.raw, raw[60:, 60:])
    torch.testing.assert_close(scores.shares, shares[60:, 60:])
    assert torch.equal(scores.masked.isinf(), torch.ones(40, 40, dtype=torch.bool).triu(1))


def test_the_last_line_of_the_lens_is_the_models_answer(make_model: Make, tokenizer: Tokenizer) -> None:
    seen = see(make_model, tokenizer, heads=(0, 3))
    assert seen.ids == tuple(tokenizer.encode("a bc\n"))
    assert seen.texts[2] == " "
    assert [head.head for head in seen.heads] == [0, 3]
    model = make_model()
    probabilities = model.logits(model(torch.tensor([seen.ids])))[0, -1].softmax(-1)
    best = probabilities.topk(5)
    assert len(seen.lens) == len(seen.layer_seconds) == 2
    assert [guess.probability for guess in seen.lens[-1]] == pytest.approx(best.values.tolist(), rel=1e-5)
    texts = [tokenizer.decode([i], skip_special=False) for i in best.indices.tolist()]
    assert [guess.token for guess in seen.lens[-1]] == texts
    assert seen.lens[0] != seen.lens[1]


@pytest.mark.parametrize(
    ("prompt", "heads", "message"),
    [
        ("x", (4,), "head is 4; the model's are 0 to 3"),
        ("x", (-1,), "head is -1"),
        ("x" * 64, (0,), "the prompt is 65 tokens; the model's context is 64"),
    ],
)
def test_wrong_arguments(
    make_model: Make, tokenizer: Tokenizer, prompt: str, heads: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        see(make_model, tokenizer, prompt, heads=heads)


def test_ids_that_the_model_lacks_are_refused(make_model: Make, tokenizer: Tokenizer) -> None:
    recorder = Recorder()
    model = Llama(make_model(vocab_size=100).config, recorder.ops)
    with pytest.raises(ValueError, match="token id 256 of the prompt is outside the model's vocabulary of 100"):
        look(model, recorder, tokenizer, "x")
