"""Which process does what, from the numbers alone."""

from __future__ import annotations

import pytest

from optune.distributed.layout import Layout, divide
from optune.errors import ConfigError


def test_what_replicas_and_tensor_parts_leave_is_sharded() -> None:
    assert divide(1) == Layout(1, 1, 1)
    assert divide(8) == Layout(1, 8, 1)
    assert divide(8, replicate=2, tensor=2) == Layout(2, 2, 2)
    assert divide(8, replicate=4, shard=2) == Layout(4, 2, 1)
    assert divide(1024, replicate=16, tensor=8).data_size == 128


@pytest.mark.parametrize(
    ("keys", "numbers"),
    [
        ({"replicate": 3}, ["makes 3", "does not divide", "processes, 4"]),
        ({"tensor": 8}, ["tensor=8", "makes 8", "processes, 4"]),
        ({"shard": 2}, ["shard=2", "makes 2", "is not the number of processes, 4"]),
        ({"shard": 4, "replicate": 2}, ["makes 8", "is not the number of processes, 4"]),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_the_numbers(keys, numbers) -> None:
    with pytest.raises(ConfigError) as raised:
        divide(4, **keys)
    assert raised.value.where == "parallel"
    assert all(number in str(raised.value) for number in numbers)


def test_parameters_that_must_stay_whole_make_every_process_a_replica() -> None:
    assert divide(4, keep_whole="it must") == Layout(4, 1, 1, keep_whole="it must")
    assert divide(4, replicate=4, shard=1, keep_whole="it must") == Layout(4, 1, 1, keep_whole="it must")
    for keys in ({"shard": 4}, {"tensor": 2}, {"shard": 2, "replicate": 2}):
        with pytest.raises(ConfigError, match="but it must"):
            divide(4, keep_whole="it must", **keys)
    with pytest.raises(ConfigError, match="processes, 4"):
        divide(4, replicate=2, keep_whole="it must")
