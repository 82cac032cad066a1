from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from llama_parallel import ParallelConfig, build_mesh
from llama_parallel.testing import run_ranks
from llama_train.host_copy import HostCopy


def test_a_copy_does_not_follow_its_tensor_and_its_memory_is_used_again() -> None:
    tensors = {"matrix": torch.arange(6.0).view(2, 3).t(), "scalar": torch.tensor(7), "none": torch.empty(0, 4)}
    copy = HostCopy(torch.device("cpu"))
    copy.reserve(tensors)
    first = copy.take(tensors)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["matrix"] += 1
    copy.hold_back()
    copy.wait()
    for name, tensor in expected.items():
        assert torch.equal(first[name], tensor)
        assert first[name].dtype == tensor.dtype
    second = copy.take(tensors)
    assert torch.equal(second["matrix"], tensors["matrix"])
    assert second["matrix"].data_ptr() == first["matrix"].data_ptr()
    reshaped = copy.take({"matrix": torch.zeros(5)})
    assert reshaped["matrix"].shape == (5,)


def test_of_a_dtensor_the_local_part_is_copied() -> None:
    def work(rank: int) -> list[float]:
        mesh = build_mesh(ParallelConfig(dp_shard=2), "cpu")["dp_shard"]
        cut = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
        values: list[float] = HostCopy(torch.device("cpu")).take({"a": cut})["a"].tolist()
        return values

    assert run_ranks(work, 2) == [[0.0, 1.0, 2.0], [3.0, 4.0]]


@pytest.mark.gpu
def test_on_a_gpu_the_update_waits_for_the_copy() -> None:
    """Without `hold_back` the addition would overtake a copy of 1 GB by far."""
    tensor = torch.zeros(2**28, device="cuda")
    copy = HostCopy(tensor.device)
    for value in range(3):
        copies = copy.take({"a": tensor})
        copy.hold_back()
        tensor += 1
        copy.wait()
        assert copies["a"].is_pinned()
        assert bool((copies["a"] == value).all())
