"""Division of heads and rows among ranks."""

from dataclasses import replace

import pytest

from fastinfer.errors import RequestError
from fastinfer.models.config import ModelConfig
from fastinfer.parallel.division import Division, divided

CONFIG = ModelConfig(
    architecture="toy",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=1,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rotary_dim=64,
    vocab_size=49152,
    max_position=8,
    norm_eps=1e-5,
)


def heads(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[range, range]]:
    division = Division(replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads), 0, size)
    return list(zip(division.query_heads(0), division.kv_heads(0), strict=True))


def test_ranges_differ_by_at_most_one() -> None:
    for count in range(20):
        for parts in range(1, 9):
            ranges = divided(count, parts)
            assert [number for part in ranges for number in part] == list(range(count))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_kv_groups_stay_whole() -> None:
    assert heads(9, 3, 2) == [(range(3), range(1)), (range(3, 9), range(1, 3))]
    assert heads(8, 4, 4) == [(range(2 * rank, 2 * rank + 2), range(rank, rank + 1)) for rank in range(4)]


def test_more_ranks_than_kv_heads_share_them() -> None:
    assert heads(6, 1, 3) == [(range(2 * rank, 2 * rank + 2), range(1)) for rank in range(3)]
    assert heads(8, 2, 3) == [(range(4), range(1)), (range(4, 6), range(1, 2)), (range(6, 8), range(1, 2))]


def test_every_rank_can_group_its_query_heads() -> None:
    for num_heads, num_kv_heads in [(9, 3), (6, 1), (8, 2), (32, 8), (12, 12)]:
        for size in range(1, num_heads + 1):
            for query, kv in heads(num_heads, num_kv_heads, size):
                assert not query or len(query) % len(kv) == 0


def test_local_config_has_a_part_of_each_width() -> None:
    local = Division(CONFIG, 1, 2).local_config
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (6, 2, 768)
    assert (local.hidden_size, local.vocab_size, local.shared_intermediate_size) == (576, 49152, 0)
    assert [len(part) for part in Division(CONFIG, 0, 5).tiles(100)] == [16, 16, 32, 16, 20]


@pytest.mark.parametrize(
    ("changes", "size", "most"),
    [({}, 10, 9), ({"hidden_size": 32}, 3, 2), ({"vocab_size": 50}, 5, 4), ({"num_heads": 8, "num_kv_heads": 2}, 9, 8)],
)
def test_too_many_ranks_are_refused(changes: dict[str, int], size: int, most: int) -> None:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"tensor_parallel_size must be at most {most} for this model.*got {size}"):
        Division(config, 0, size).check()
    Division(config, 0, most).check()
