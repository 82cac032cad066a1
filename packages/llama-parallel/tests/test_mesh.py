from typing import Any

import pytest
import torch
import torch.distributed as dist

from llama_parallel import ParallelConfig, build_mesh
from llama_parallel.mesh import batch_group, parameter_mesh, world_group
from llama_parallel.testing import RankError, run_ranks


def places(rank: int, config: ParallelConfig) -> dict[str, Any]:
    mesh = build_mesh(config, "cpu")
    data = parameter_mesh(mesh)
    found: dict[str, Any] = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names or ()}
    found["names"] = mesh.mesh_dim_names
    found["shape"] = tuple(mesh.shape)
    found["data"] = (data.mesh_dim_names, tuple(data.get_coordinate() or ()))
    for name, group in (("batch", batch_group(mesh)), ("world", world_group(mesh))):
        members = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        members[rank] = 1
        dist.all_reduce(members, group=group)
        found[name] = members.nonzero().flatten().tolist()
    return found


def test_tp_is_fastest_then_cp_dp_pp() -> None:
    ranks = run_ranks(places, 8, ParallelConfig(pp=2, cp=2, tp=2))
    assert ranks[0]["names"] == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert ranks[0]["shape"] == (2, 1, 1, 2, 2)
    assert [(r["pp"], r["cp"], r["tp"]) for r in ranks] == [(i // 4, i // 2 % 2, i % 2) for i in range(8)]
    assert ranks[5]["batch"] == [5, 7]
    assert ranks[5]["world"] == list(range(8))


def test_parameters_are_sharded_over_dp_and_cp_together() -> None:
    ranks = run_ranks(places, 8, ParallelConfig(dp_replicate=2, dp_shard=2, cp=2))
    assert ranks[0]["data"][0] == ("dp_replicate", "dp_shard_cp")
    assert [r["data"][1] for r in ranks] == [(i // 4, i % 4) for i in range(8)]
    assert [(r["dp_replicate"], r["dp_shard"], r["cp"]) for r in ranks] == [
        (i // 4, i // 2 % 2, i % 2) for i in range(8)
    ]
    assert ranks[3]["batch"] == list(range(8))


def test_other_number_of_processes_is_refused() -> None:
    with pytest.raises(RankError, match=r"tp 4 .*= 4 processes, but 2 were started"):
        run_ranks(places, 2, ParallelConfig(tp=4))
