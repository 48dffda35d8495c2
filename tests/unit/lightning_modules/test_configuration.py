"""Mappings as configurations."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_dalle.lightning_modules.configuration import as_config, check_ranges


@dataclass(frozen=True)
class Inner:
    rate: float


@dataclass(frozen=True)
class Outer:
    size: int
    inner: Inner = Inner(1.0)


def test_a_configuration_passes() -> None:
    outer = Outer(1)
    assert as_config(Outer, outer, "outer") is outer


@pytest.mark.parametrize("value", [Outer(2, Inner(3.0)), Outer(5)])
def test_mapping_of_a_configuration_gives_it_back(value: Outer) -> None:
    assert as_config(Outer, dataclasses.asdict(value), "outer") == value


def test_mapping_of_some_fields_keeps_the_default_s_others() -> None:
    @dataclass(frozen=True)
    class Pair:
        first: int = 1
        second: int = 2

    @dataclass(frozen=True)
    class Holder:
        pair: Pair = Pair(first=3, second=4)

    # Type hints of local classes are not strings here, and so are found.
    assert as_config(Holder, {"pair": {"second": 5}}, "holder") == Holder(Pair(3, 5))


def test_absent_fields_take_their_defaults() -> None:
    assert as_config(Outer, {"size": 2}, "outer") == Outer(2)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"size": 1, "sise": 2},
            r"outer has unknown fields \['sise'\] and lacks \[\]; the fields of Outer are size, in",
        ),
        ({}, r"outer has unknown fields \[\] and lacks \['size'\]"),
        ({"size": 1, "inner": {"speed": 1}}, r"outer.inner has unknown fields \['speed'\] and lacks \[\]"),
    ],
)
def test_other_fields_are_named(mapping: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_config(Outer, mapping, "outer")


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"outer \(7\) must be a Outer or a mapping of its fields"):
        as_config(Outer, 7, "outer")


@dataclass(frozen=True)
class Plain:
    count: int = 1
    share: float = 0.5
    flag: bool = False
    name: str = "a"
    limit: int | None = None


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"count": "many"}, r"plain.count \('many'\) must be of type int"),
        ({"count": True}, r"plain.count \(True\) must be of type int"),
        ({"share": "1e-3"}, r"plain.share \('1e-3'\) must be of type float"),
        ({"flag": 1}, r"plain.flag \(1\) must be of type bool"),
        ({"name": 2}, r"plain.name \(2\) must be of type str"),
    ],
)
def test_a_value_of_another_plain_type_is_named(mapping: Mapping[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_config(Plain, mapping, "plain")


def test_a_whole_number_is_a_share_and_a_union_is_left_to_the_class() -> None:
    assert as_config(Plain, {"share": 1, "limit": None}, "plain") == Plain(share=1.0)


@dataclass(frozen=True)
class Ranges:
    step: float = 1.0
    decay: float = 0.0
    beta: float = 0.0
    share: float = 1.0
    kind: str = "one"

    def __post_init__(self) -> None:
        check_ranges(
            self,
            positive=("step",),
            not_negative=("decay",),
            decays=("beta",),
            shares=("share",),
            choices={"kind": ("one", "two")},
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 0.0}, r"step \(0.0\) must be positive"),
        ({"step": math.nan}, r"step \(nan\) must be positive"),
        ({"decay": -1.0}, r"decay \(-1.0\) must be at least 0"),
        ({"beta": 1.0}, r"beta \(1.0\) must be in \[0, 1\)"),
        ({"share": 1.5}, r"share \(1.5\) must be in \[0, 1\]"),
        ({"kind": "three"}, r"kind \('three'\) must be 'one' or 'two'"),
    ],
)
def test_fields_out_of_range_are_named(changes: Mapping[str, Any], message: str) -> None:
    Ranges()
    with pytest.raises(ValueError, match=message):
        Ranges(**changes)
