"""Configurations as frozen dataclasses in the code and as plain mappings in files."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule

from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.ops.hardware import warn_if_slow


def data_parallel_rank(module: LightningModule) -> int:
    """Return the number of the process among those that get different samples; 0 without a Trainer.

    Processes that share samples, as the parts of one sequence do, so draw the same random numbers.
    """
    shares = None if module._trainer is None else module._trainer.distributed_sampler_kwargs
    return 0 if shares is None else int(shares["rank"])


_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16}


def warn_if_precision_is_slow(module: LightningModule) -> None:
    """Warn if the precision of the module's Trainer is much slower than 32 bits on its CPU; it is kept."""
    trainer = module.trainer
    dtype = _DTYPES.get(str(trainer.precision).partition("-")[0])
    if dtype is not None:
        warn_if_slow(dtype, trainer.strategy.root_device)


def load_tokenizer(source: str | Path) -> CaptionTokenizer:
    """Return the tokenizer of a file's path, or of the file's JSON text."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return CaptionTokenizer.from_json(source)
    return CaptionTokenizer.from_file(source)


Config = TypeVar("Config")


def as_config(config_class: type[Config], value: Config | Mapping[str, Any], argument: str) -> Config:
    """Return `value` as a `config_class`, also where fields of it are configurations themselves.

    Args:
        config_class: A dataclass.
        value: One of them, or a mapping from its field names, as `dataclasses.asdict` gives it. Of a field that is a
            configuration with a default, a mapping may name some fields alone.
        argument: Name of the argument the value came from, for the error messages.

    Raises:
        TypeError: If the value is neither, or a field of a plain type gets something else.
        ValueError: If the mapping names a field that does not exist or lacks one that has no default.
    """
    if isinstance(value, config_class):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{argument} ({value!r}) must be a {config_class.__name__} or a mapping of its fields")
    fields = {field.name: field for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    unknown = sorted(set(value) - set(fields))
    required = {name for name, field in fields.items() if _has_no_default(field)}
    missing = sorted(required - set(value))
    if unknown or missing:
        raise ValueError(
            f"{argument} has unknown fields {unknown} and lacks {missing}; "
            f"the fields of {config_class.__name__} are {', '.join(fields)}"
        )
    types = typing.get_type_hints(config_class)
    for name, content in value.items():
        _check_plain_type(content, types[name], f"{argument}.{name}")
    converted = {
        name: as_config(types[name], _over_default(fields[name], value[name]), f"{argument}.{name}")
        for name in value
        if dataclasses.is_dataclass(types[name])
    }
    return config_class(**{**value, **converted})


def check_ranges(
    config: object,
    *,
    positive: Iterable[str] = (),
    not_negative: Iterable[str] = (),
    decays: Iterable[str] = (),
    shares: Iterable[str] = (),
    choices: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Refuse fields that are out of range, for the checks of a configuration when it is made.

    Args:
        positive: Names of fields above 0.
        not_negative: Names of fields that are at least 0.
        decays: Names of fields in [0, 1), such as the betas of Adam.
        shares: Names of fields in [0, 1].
        choices: Names of fields that are one of a few strings, and these.

    Raises:
        ValueError: That names the first such field, its value and what it may be. What is no number is out of range.
    """
    for names, range_name, holds in (
        (positive, "positive", lambda value: value > 0),
        (not_negative, "at least 0", lambda value: value >= 0),
        (decays, "in [0, 1)", lambda value: 0 <= value < 1),
        (shares, "in [0, 1]", lambda value: 0 <= value <= 1),
    ):
        for name in names:
            if not holds(getattr(config, name)):
                raise ValueError(f"{name} ({getattr(config, name)}) must be {range_name}")
    for name, known in choices.items():
        if getattr(config, name) not in known:
            raise ValueError(f"{name} ({getattr(config, name)!r}) must be {' or '.join(map(repr, known))}")


def _check_plain_type(value: object, expected: Any, argument: str) -> None:
    accepted: dict[type, Any] = {bool: bool, float: (int, float), int: int, str: str}
    # A bool is an int to Python, and hardly ever what was meant where a number is asked for.
    if expected in accepted and (
        not isinstance(value, accepted[expected]) or isinstance(value, bool) != (expected is bool)
    ):
        raise TypeError(f"{argument} ({value!r}) must be of type {expected.__name__}")


def _over_default(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a mapping of some fields of a configuration with the others as its default has them."""
    if not isinstance(value, Mapping) or not dataclasses.is_dataclass(field.default):
        return value
    return {**dataclasses.asdict(field.default), **value}  # type: ignore[arg-type]


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
