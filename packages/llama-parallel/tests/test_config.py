import dataclasses

import pytest

from llama_parallel import ParallelConfig

AXES = ["dp_replicate", "dp_shard", "cp", "tp", "pp"]


def test_default_is_one_process() -> None:
    config = ParallelConfig()
    assert [getattr(config, axis) for axis in AXES] == [1] * 5
    assert config.num_processes == 1
    config.check(world_size=1)


def test_sizes_multiply() -> None:
    # Different primes: a dimension left out of a product, or counted twice, gives another number.
    config = ParallelConfig(dp_replicate=2, dp_shard=3, cp=5, tp=7, pp=11)
    assert config.dp == 6
    assert config.num_processes == 2310
    config.check(world_size=2310)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1, 1.0, "2", True, None])
def test_size_that_is_no_positive_whole_number_is_refused(axis: str, size: object) -> None:
    with pytest.raises(ValueError, match=rf"^{axis} = .*at least 1$") as error:
        ParallelConfig(**{axis: size})  # type: ignore[arg-type]
    assert repr(size) in str(error.value)


@pytest.mark.parametrize("world_size", [1, 4, 16])
def test_other_number_of_processes_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"dp_shard 2 .* tp 4 .*= 8 processes, but {world_size} were started"):
        ParallelConfig(dp_shard=2, tp=4).check(world_size)


def test_is_a_value() -> None:
    config = ParallelConfig(tp=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tp = 4  # type: ignore[misc]
    assert config == ParallelConfig(tp=2)
    assert hash(config) == hash(ParallelConfig(tp=2))
