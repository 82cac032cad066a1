"""Loading Hugging Face folders: values, memory, and every fault named at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llama_core import CheckpointError, Llama, LlamaConfig, load_model, load_tokenizer
from llama_core.parameter_shapes import parameter_shapes
from llama_core.save import save_model

Make = Callable[..., Llama]
TOKENS = torch.tensor([[1, 5, 9, 2]])


def logits(model: Llama, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(tokens))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_reads_what_transformers_writes(tmp_path: Path, shard: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attention_bias=True, initializer_range=0.2,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    ours = load_model(tmp_path)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    with torch.no_grad():
        torch.testing.assert_close(logits(ours), theirs(TOKENS).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_parameter_shapes_are_those_of_the_model(tied: bool, bias: bool) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=not bias,
    )  # fmt: skip
    with torch.device("meta"):
        model = Llama(config)
    assert parameter_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}


# --- B01: the tied head ---


def test_b01_tied_model_comes_back(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0(tie_word_embeddings=True)
    save_model(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    assert (logits(loaded) - logits(model)).abs().max() == 0
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.num_parameters() == model.num_parameters() == make_t0().num_parameters() - 128 * 32
    with torch.no_grad():
        loaded.lm_head.weight[3, 4] = 7.0
    assert loaded.model.embed_tokens.weight[3, 4] == 7.0


def test_b01_tied_head_may_be_in_the_file_if_it_is_the_embedding(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0(tie_word_embeddings=True)
    save_model(model, tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert (logits(load_model(tmp_path)) - logits(model)).abs().max() == 0

    edit_weights(tmp_path, lambda t: t["lm_head.weight"][100, 3].add_(1.0))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs.*set it to false, or remove"):
        load_model(tmp_path)


def test_b01_untied_model_without_head_is_refused(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0(tie_word_embeddings=True), tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight .*tie_word_embeddings"):
        load_model(tmp_path)


# --- B06: biases ---


def test_b06_biases_are_loaded_saved_and_counted(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0(attention_bias=True, mlp_bias=True)
    assert model.num_parameters() == make_t0().num_parameters() + 512
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    biases = [name for name in loaded.state_dict() if name.endswith(".bias")]
    assert len(biases) == 14
    assert (loaded.config.attention_bias, loaded.config.mlp_bias) == (True, True)
    assert all(torch.equal(loaded.state_dict()[name], model.state_dict()[name]) for name in biases)


@pytest.mark.parametrize(("attention", "unexpected"), [(True, 6), (False, 14)])
def test_b06_biases_that_the_config_denies_are_named(
    tmp_path: Path, make_t0: Make, attention: bool, unexpected: int
) -> None:
    save_model(make_t0(attention_bias=True, mlp_bias=True), tmp_path)
    edit_config(tmp_path, attention_bias=attention, mlp_bias=False)
    with pytest.raises(CheckpointError, match=f"{unexpected} unexpected: ") as caught:
        load_model(tmp_path)
    denied = ("mlp",) if attention else ("mlp", "self_attn")
    names = [n for n in load_file(tmp_path / "model.safetensors") if n.endswith(".bias") and n.split(".")[3] in denied]
    assert len(names) == unexpected
    assert all(name in str(caught.value) for name in names)


def test_b06_attention_bias_alone_adds_192_parameters(make_t0: Make) -> None:
    assert make_t0(attention_bias=True).num_parameters() == make_t0().num_parameters() + 192


# --- dtypes and independence of the file ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_the_files_unless_asked_for(tmp_path: Path, make_t0: Make, dtype: torch.dtype) -> None:
    model = make_t0()
    save_model(model, tmp_path, dtype=dtype)
    loaded = load_model(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32  # B11, loaded directly in half precision
    assert loaded.model.rotary_emb.inv_freq[0] == 1.0
    for name, tensor in load_model(tmp_path, dtype=torch.float32).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].to(dtype).to(torch.float32)), name


def test_a_few_float32_norms_do_not_make_a_float32_model(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0(), tmp_path, dtype=torch.bfloat16)

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.float() for name, tensor in tensors.items() if "norm" in name})

    edit_weights(tmp_path, widen)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.bfloat16}


def test_model_does_not_change_with_its_file(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0()
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    path = tmp_path / "model.safetensors"
    with open(path, "r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\0" * 4096)
    assert torch.equal(logits(loaded), logits(model))
    path.unlink()
    assert torch.equal(logits(loaded), logits(model))


def test_old_rotary_buffers_are_ignored(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0()
    save_model(model, tmp_path)
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((4,), 9.0) for i in range(2)}
    edit_weights(tmp_path, lambda t: t.update(old))
    assert torch.equal(logits(load_model(tmp_path)), logits(model))


def test_wrong_dtype_argument() -> None:
    with pytest.raises(ValueError, match=r"torch\.int8.*torch\.float32"):
        load_model("nowhere", dtype=torch.int8)


# --- faults ---


def test_all_faults_in_one_error(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0(), tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(32, 31)
        tensors["lm_head.weight"] = torch.zeros(128, 32, dtype=torch.int32)

    edit_weights(tmp_path, damage)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    text = str(caught.value)
    for part in (
        "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "1 unexpected: model.layers.7.mlp.up_proj.weight",
        "1 misshapen: model.layers.0.self_attn.q_proj.weight is [32, 31], must be [32, 32]",
        "1 of another type than float32, float16, bfloat16, float64: lm_head.weight is torch.int32",
        str(tmp_path),
    ):
        assert part in text


def test_eight_bit_floats_without_scales_are_no_weights(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0(), tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(tmp_path, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is torch\.float8_e4m3fn"):
        load_model(tmp_path)


def test_long_lists_are_cut(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0(), tmp_path)
    edit_config(tmp_path, num_hidden_layers=20)
    with pytest.raises(CheckpointError, match=r"162 missing: .* … and 142 more"):
        load_model(tmp_path)


def test_a_billion_layers_cost_nothing(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0(), tmp_path)
    edit_config(tmp_path, num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match="1000000000 layers, there are only 21 tensors"):
        load_model(tmp_path)


def sharded(folder: Path, make_t0: Make) -> dict[str, Any]:
    save_model(make_t0(), folder, max_shard_bytes=20_000)
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


def test_missing_shards_are_named(tmp_path: Path, make_t0: Make) -> None:
    index = sharded(tmp_path, make_t0)
    gone = sorted(set(index["weight_map"].values()))[1:3]
    for name in gone:
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match="names 2 files that are not there: " + ", ".join(gone)):
        load_model(tmp_path)


def test_index_and_shards_that_disagree(tmp_path: Path, make_t0: Make) -> None:
    index = sharded(tmp_path, make_t0)
    shards = sorted(set(index["weight_map"].values()))
    moved = next(name for name, shard in index["weight_map"].items() if shard == shards[0])
    index["weight_map"][moved] = shards[1]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"1 named by the index and not in their file: {moved} in {shards[1]}"):
        load_model(tmp_path)


def test_shard_holds_more_than_the_index_says(tmp_path: Path, make_t0: Make) -> None:
    index = sharded(tmp_path, make_t0)
    shard = index["weight_map"].pop("model.norm.weight")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"not in the index: model.norm.weight in {shard}"):
        load_model(tmp_path)


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", "config.json", 3, None])
def test_index_may_name_only_files_of_its_folder(tmp_path: Path, make_t0: Make, target: Any) -> None:
    index = sharded(tmp_path, make_t0)
    index["weight_map"]["model.norm.weight"] = target
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_map must name"):
        load_model(tmp_path)


def test_index_without_map(tmp_path: Path, make_t0: Make) -> None:
    sharded(tmp_path, make_t0)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match="'weight_map' of tensor name"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["{", "\xff\xfe", "[" * 100_000, "3"])
def test_broken_json_is_one_error_that_names_the_file(tmp_path: Path, make_t0: Make, name: str, text: str) -> None:
    sharded(tmp_path, make_t0)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=name):
        load_model(tmp_path)


def test_truncated_file(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0(), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 8, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: .*truncated"):
            load_model(tmp_path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="bytes behind the last tensor"):
        load_model(tmp_path)


def header(**entry: Any) -> bytes:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(data_offsets=[-8, 0]), "data_offsets"),
        (header(data_offsets=[8, 0]), "data_offsets"),
        (header(data_offsets=[0, 8.0]), "data_offsets"),
        (header(data_offsets=[0]), "data_offsets"),
        (header(shape=[2, -1]), "shape"),
        (header(shape=[1 << 40, 1 << 40]), "shape"),
        (header(shape=[3]), "needs 12 bytes"),
        (header(shape=[True, 2]), "shape"),
        (header(dtype="F99"), "F99"),
        (header(dtype=[]), "dtype"),
        (header(data_offsets=[4, 12]), "begins at data byte 4"),
        (b"\xff" * 8 + b"{}", "header of 18446744073709551615 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "JSON object"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "dtype, shape and data_offsets"),
        ((13).to_bytes(8, "little") + b'{"a":1,"a":2}', "names twice: a"),
        ((20).to_bytes(8, "little") + b'{"__metadata__":{"a"', "no valid JSON"),
        ((22).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}'[:22], "no valid JSON"),
        ((24).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}', "object of strings"),
    ],
)
def test_damaged_header(tmp_path: Path, make_t0: Make, content: bytes, message: str) -> None:
    save_model(make_t0(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(tmp_path)
    assert "model.safetensors" in str(caught.value)


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds neither config\.json nor params\.json"):
        load_model(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match="holds an adapter, no model"):
        load_model(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        load_model(tmp_path / "notes.txt")
    (tmp_path / "a.gguf").write_text("GGUF")
    with pytest.raises(CheckpointError, match=r"name one of them, for example .*a\.gguf"):
        load_model(tmp_path)


def test_folder_with_other_weights_says_so(tmp_path: Path, make_t0: Make) -> None:
    index = sharded(tmp_path, make_t0)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=f"there are shards .{min(index['weight_map'].values())}.* but no index"):
        load_model(tmp_path)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        load_model(tmp_path)


# --- GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["hf", "meta", "gguf"])
def test_straight_onto_a_gpu(tmp_path: Path, make_t0: Make, wanted: torch.dtype, format: str) -> None:
    # wide enough for several pieces and for scratch memory that is used again
    wide = make_t0(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, head_dim=64)
    save_model(wide, tmp_path / "m", format=format)
    cpu, gpu = (load_model(tmp_path / "m", dtype=wanted, device=device) for device in ("cpu", "cuda"))
    for name, tensor in cpu.state_dict().items():
        assert gpu.state_dict()[name].is_cuda
        assert torch.equal(gpu.state_dict()[name].cpu(), tensor), name
    save_model(gpu, tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == cpu.state_dict().keys()


# --- memory ---

PEAK = """
import sys
from pathlib import Path
import torch
from llama_core import load_model

def kilobytes(key):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key)).split()[1])

wanted = getattr(torch, sys.argv[3])
load_model(sys.argv[1], dtype=wanted)  # a tiny one first: imported code and thread pools are no part of the measure
Path("/proc/self/clear_refs").write_text("5")  # peak := now
before = kilobytes("VmRSS")
model = load_model(sys.argv[2], dtype=wanted)
size = sum(p.numel() * p.element_size() for p in model.parameters())
print((kilobytes("VmHWM") - before) * 1024 / size)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize(
    ("stored", "wanted"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_peak_memory(tmp_path: Path, make_t0: Make, stored: str, wanted: str) -> None:
    # Peak resident memory: stricter than the anonymous memory that is promised, and needs no sampling.
    save_model(make_t0(), tmp_path / "tiny", dtype=getattr(torch, stored))
    elements = 200e6 / getattr(torch, wanted).itemsize
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=int(elements / 8 / 512 / 3) // 8 * 8, num_hidden_layers=8,
        num_attention_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = Llama(config).to(getattr(torch, stored))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    save_model(model, tmp_path / "big")
    arguments = [sys.executable, "-c", PEAK, str(tmp_path / "tiny"), str(tmp_path / "big"), wanted]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert 0.9 < float(run.stdout) <= 1.15


@pytest.mark.parametrize("read", [load_model, load_tokenizer])
@pytest.mark.parametrize("kind", ["model.gguf", "folder"])
def test_what_the_system_refuses_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], kind: str
) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        read(tmp_path / ("m" * 300))
    path = tmp_path / kind
    path.write_bytes(b"GGUF") if kind == "model.gguf" else path.mkdir()

    def refuse(self: Path, *_: object, **__: object) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)  # tests may run as root, whom nothing is refused
    with pytest.raises(CheckpointError, match=f"{kind}.* cannot be read: Permission denied"):
        read(path)
