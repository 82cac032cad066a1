"""What a machine can do, as numbers that every formula of the planner takes as arguments."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Hardware:
    """Rates of one GPU and of the links between GPUs; defaults are an H100 SXM's.

    Raises:
        ValueError: a number that is not above 0.
    """

    gpus_per_node: int = 8
    """GPUs that NVLink joins."""

    peak_flops: float = 989.5e12
    """FLOP/s by which model FLOP/s utilisation is divided: dense bfloat16, of the data sheet."""

    product_flops: float = 686e12
    """FLOP/s that large bfloat16 matrix products reach: 8192³ measured on an H200, whose arithmetic is an H100's."""

    attention_flops: float = 450e12
    """FLOP/s of causal attention, forward and backward together: between torch's FlashAttention-2 (300) and cuDNN
    (520), measured at head width 128 and 8192 tokens."""

    memory_bandwidth: float = 2.97e12
    """Bytes/s, read and written together, of operations that compute little: the 4.26 TB/s that an H200 copies at,
    times 3.35 / 4.8, the ratio of both data sheets."""

    nvlink_bandwidth: float = 360e9
    """Bytes/s that a GPU sends to others of its host in a collective: 80% of the 450 GB/s of NVLink 4 one way."""

    network_bandwidth: float = 40e9
    """Bytes/s that a GPU sends to other hosts: 80% of one 400 Gbit/s adapter for each GPU."""

    latency: float = 10e-6
    """Seconds that a step of a collective takes at least, within a host."""

    network_latency: float = 20e-6
    """Seconds that a step of a collective takes at least, between hosts."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{field.name} = {value!r}: must be a number above 0")

    def links(self, stride: int, size: int) -> tuple[float, float]:
        """(bytes/s that each rank of a group sends, seconds for one step), for `size` ranks that lie `stride` apart.

        A group inside a host has NVLink. A group that spans hosts is a ring that crosses from host to host once, and
        NCCL makes a ring through the adapter of each of its members on a host: n members there have n adapters.
        """
        if stride * size <= self.gpus_per_node:
            return self.nvlink_bandwidth, self.latency
        members = max(1, self.gpus_per_node // stride)
        return min(self.nvlink_bandwidth, members * self.network_bandwidth), self.network_latency


H100 = Hardware()
H200 = Hardware(memory_bandwidth=4.26e12)
