"""The processes as a grid with named dimensions: what torch calls a DeviceMesh."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .config import ParallelConfig

_BATCH, _WORLD = "dp_cp", "world"


def build_mesh(config: ParallelConfig, device_type: str = "cpu") -> DeviceMesh:
    """Lay the processes of the default group out as a mesh with dimensions pp, dp_replicate, dp_shard, cp, tp.

    Neighbouring ranks differ in tp first, then cp, dp and pp: the dimensions that talk most stay on one host.

    Args:
        config: the sizes; their product must be the number of processes.
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: another number of processes.
    """
    config.check(dist.get_world_size())
    # dp_shard and cp are made as one dimension and then split. Parameters are sharded over both together, and every
    # view of parameters (FSDP's and TP's) must come from one root mesh. Slicing a dimension flattened afterwards is
    # deprecated since torch 2.10.
    root = init_device_mesh(
        device_type,
        (config.pp, config.dp_replicate, config.dp_shard * config.cp, config.tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard_cp", "tp"),
    )
    root["dp_replicate", "dp_shard_cp"]._flatten(_BATCH)
    root._flatten(_WORLD)
    return root._unflatten(2, (config.dp_shard, config.cp), ("dp_shard", "cp"))


def parameter_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The two dimensions FSDP works on: dp_replicate and dp_shard · cp, the latter flattened to `dp_shard_cp`."""
    return mesh._get_root_mesh()["dp_replicate", "dp_shard_cp"]


def batch_group(mesh: DeviceMesh) -> ProcessGroup:
    """The processes that see different tokens of one batch: dp_replicate · dp_shard · cp."""
    return mesh.get_group(_BATCH)


def world_group(mesh: DeviceMesh) -> ProcessGroup:
    """All processes of the mesh."""
    return mesh.get_group(_WORLD)
