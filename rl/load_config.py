"""Reading a configuration: TOML, overrides, one clear sentence for whatever is wrong in it."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from palestra.envs.errors import ConfigError
from palestra.rl.config import Config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file with `key.path=value` overrides. Raises ConfigError, one sentence for each fault."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; `configs/` holds examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers too long to be read, and brackets too deep
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        _apply(values, override)
    return parse_config(values, str(path))


def parse_config(values: Mapping[str, Any], where: str) -> Config:
    """A validated configuration from plain values."""
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_sentences(error, where)))) from None


def to_toml(config: Config) -> str:
    """The resolved configuration as a file that `load_config` reads back to the same settings."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def differences(old: Config, new: Config) -> list[str]:
    """Settings that differ, one line each."""
    before, after = dict(_flat(old.model_dump())), dict(_flat(new.model_dump()))
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or key.startswith(("+", "-", "~")):
        raise ConfigError(f"override {override!r}: write key.path=value, as in run.steps=20")
    *tables, last = key.strip().split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {override!r}: {table} is a value, not a section")
    values[last] = _value(text.strip())


def _value(text: str) -> Any:
    """A TOML value; bare words are strings, as a shell user writes them."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text


def _sentences(error: ValidationError, where: str) -> Iterator[str]:
    for fault in error.errors():
        at = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            yield f"{where}: {_unknown(tuple(map(str, fault['loc'])))}"
        elif fault["type"] == "value_error":
            yield f"{where}: {fault['ctx']['error']}"
        else:
            message = fault["msg"][0].lower() + fault["msg"][1:]
            if fault["type"] == "model_type":
                message = "it is a section; its settings are written section.key=value"
            yield f"{where}: {at} is {_short(fault['input'])}, but {message.replace('input ', 'it ', 1)}"


def _short(value: object) -> str:
    """The value as it was written, cut where nobody would read on."""
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:80]}... ({len(shown)} characters)"


def _unknown(loc: tuple[str, ...]) -> str:
    *section, key = loc
    table = f"[{'.'.join(section)}]" if section else "the file"
    everywhere = list(_known(Config, ()))
    elsewhere = [".".join(known) for known in everywhere if known[-1] == key]
    if elsewhere:
        return f"no setting {key!r} in {table}; it belongs to {' or '.join(elsewhere)}"
    here = [known[-1] for known in everywhere if list(known[:-1]) == section]
    near = difflib.get_close_matches(key.replace("-", "_").lstrip("+"), here, n=1, cutoff=0.5)
    if near:
        return f"no setting {key!r} in {table}. Did you mean {near[0]!r}?"
    wide = difflib.get_close_matches(key, [known[-1] for known in everywhere], n=1, cutoff=0.7)
    hint = next((".".join(known) for known in everywhere if wide and known[-1] == wide[0]), None)
    return f"no setting {key!r} in {table}. " + (f"Did you mean {hint!r}?" if hint else f"Have: {', '.join(here)}")


def _known(model: type[BaseModel], at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every section and setting of the schema, as paths."""
    for name, field in model.model_fields.items():
        yield (*at, name)
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _known(kind, (*at, name))


def _flat(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and key != "options":
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: a setting that is absent takes its default, which is None."""
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in values.items() if v is not None}
