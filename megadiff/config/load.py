"""Load yaml files from left to right, then key=value overrides.

A typo or a wrong type is a ConfigError with the full key and a near match.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from megadiff.config.algorithm import with_algorithm_defaults
from megadiff.config.flat import flat_texts
from megadiff.config.key import bound_texts
from megadiff.config.rewards import NAMED_SECTIONS, RewardConfig
from megadiff.config.schema import FIELDS, SECTIONS, Config
from megadiff.config.synonyms import SYNONYMS


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


# Plain dicts: a node of OmegaConf raises for a key without a value.
SCHEMA = _plain(OmegaConf.structured(Config))
NAMED_SCHEMAS = {
    f"{name}.": _plain(OmegaConf.structured(section)) for name, section in NAMED_SECTIONS.items()
}
NULLS = ("", "~", "null", "Null", "NULL")  # what YAML reads as no value

# Not taken silently: a config that is read again should say what is meant today.
RENAMED = {  # refused key → what to write instead
    "train.expert_balance": "train.component_weighting, with the same values",
    "rollout.expert_windows": "rollout.component_windows, with the same values",
    "rollout.first_frame": "rollout.images, with the same values",
    "engine.offload_idle": "engine.offload: true is auto, false is never",
    "algorithm.global_std": "algorithm.advantage: true is global, false is group",
}


class ConfigError(ValueError):
    """The config is wrong; the text says which key, and what would be right."""


def load_config(arguments: Sequence[str]) -> Config:
    """Merge the schema's defaults, the yaml files and the key=value overrides, in this order.

    Raises ConfigError: no such file, not yaml, unknown key, wrong type, a key without a value.
    """
    merged = _merged(arguments)
    config = _to_object(arguments, merged)
    assert isinstance(config, Config)
    config.algorithm = with_algorithm_defaults(config.algorithm)
    return config


def check_model_path(config: Config, arguments: Sequence[str]) -> None:
    """Raise ConfigError for a model that is missing here, and is in the tree of a config file."""
    path = Path(config.model.path)
    if path.is_absolute() or path.exists():
        return
    for argument in arguments:
        # As _layers() tells files from overrides.
        if not os.path.isfile(argument):
            continue
        for folder in Path(argument).resolve().parents:
            if (folder / path).is_dir():
                raise ConfigError(
                    f"model.path={path} is no folder, as it means {path.absolute()}: relative "
                    f"paths start at the current folder. {argument} has it beside itself: start "
                    f"the command in {folder}, or set model.path={folder / path}"
                )


def load_rewards(arguments: Sequence[str]) -> dict[str, RewardConfig]:
    """Return the section `reward` of a config that need not be whole. Raises as load_config()."""
    rewards = _to_object(arguments, _merged(arguments), section="reward")
    assert isinstance(rewards, dict)
    return {str(name): reward for name, reward in rewards.items()}


def last_named(arguments: Sequence[str], keys: Sequence[str]) -> str:
    """Return which of the keys the last layer that names any of them has; "" for none.

    Of several in one layer it is the first of `keys`. Raises ConfigError as load_config().
    """
    for _, layer in reversed([*_layers(arguments)]):
        for key in keys:
            section, _, name = key.partition(".")
            # Plain: an interpolation may be of another layer.
            values = _plain(layer).get(section)
            if isinstance(values, dict) and values.get(name) is not None:
                return key

    return ""


def _merged(arguments: Sequence[str]) -> DictConfig:
    merged = OmegaConf.structured(Config)
    for source, layer in _layers(arguments):
        if OmegaConf.select(layer, "parity.mode") is False:  # what YAML makes of a bare off
            layer.parity.mode = "off"
        _check_kinds(source, SCHEMA, _plain(layer))
        _take_out(source, merged, layer)

        try:
            merged = OmegaConf.merge(merged, layer)
        except ConfigKeyError as error:
            key = str(error.full_key)
            raise ConfigError(f"{source}: unknown key {key}; {_advice(key)}") from error
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source}: {_wrong_type(error)}") from error

    return merged


def _wrong_type(error: OmegaConfBaseException) -> str:
    """Return what OmegaConf refused, for a number that is none in plain words and with its rule."""
    key = str(error.full_key or "")
    reason = str(error).splitlines()[0]
    match = re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", reason)
    kinds = {"Float": "number", "Integer": "whole number"}
    if not match or match[2] not in kinds:
        return f"{key}: {reason}" if key else reason

    value = match[1]
    kind = kinds[match[2]]
    field = _field_of(key)
    rules = " and ".join(bound_texts(field.metadata["bounds"])) if field else ""
    return f"{key}={value!r} is no {kind}; give one{rules and f' that is {rules}'}"


def _field_of(key: str) -> dataclasses.Field | None:
    """Return the schema's field of a key, or of the mapping that it is in."""
    section, *names = key.split(".")
    if section in NAMED_SECTIONS:
        names = names[1:]  # the first one is the user's
    elif section not in SECTIONS:
        names = [section]
        section = ""
    return FIELDS.get((section, names[0])) if names else None


def _take_out(source: str, merged: DictConfig, layer: DictConfig) -> None:
    """Remove the rewards and judges that a layer sets to null, from both.

    Raises ConfigError for one that no earlier layer brought.
    """
    for section in NAMED_SECTIONS:
        # Plain: an interpolation is not resolved yet.
        named = _plain(layer).get(section)
        if not isinstance(named, dict):
            continue

        for name in [name for name, value in named.items() if value is None]:
            if name not in merged[section]:
                names = sorted(map(str, merged[section]))
                near = difflib.get_close_matches(str(name), names, n=1)
                advice = f"did you mean {section}.{near[0]}?" if near else "leave it out"
                raise ConfigError(
                    f"{source}: {section}.{name} is null, which removes it, but what comes before "
                    f"has {', '.join(names) or 'none'}; {advice}"
                )
            del merged[section][name]
            del layer[section][name]


def _to_object(arguments: Sequence[str], merged: DictConfig, *, section: str = "") -> object:
    """Return the merged config, or one section of it, as dataclasses, interpolations resolved.

    Raises ConfigError for a key without a value, and for an interpolation that leads nowhere.
    """
    try:
        # Only now: a later layer could still have given them.
        missing = sorted(key for key in OmegaConf.missing_keys(merged) if key.startswith(section))
        if missing:
            raise ConfigError(
                f"missing {', '.join(missing)}; give each in a yaml file or as key=value"
            )
        return OmegaConf.to_object(merged[section] if section else merged)
    except OmegaConfBaseException as error:
        key = str(error.full_key or section)
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{_source_of(key, arguments)}: {key}: {reason}; mend the ${{…}}"
        ) from error


def _source_of(key: str, arguments: Sequence[str]) -> str:
    """Return the last layer that gives a key or a section around it, "config" for none."""
    names = re.split(r"[.\[]", key)
    for source, layer in reversed([*_layers(arguments)]):
        value: Any = _plain(layer)
        for name in names:
            value = value.get(name) if isinstance(value, dict) else value
        if value is not None:
            return source

    return "config"


def to_dict(config: Config) -> dict:
    """Return the config as plain dicts and lists."""
    # Not by OmegaConf, which would resolve a text that has `${` in it.
    return dataclasses.asdict(config)


def save_config(config: Config, path: Path) -> None:
    """Write the config as yaml; loading it gives the same config."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(_escaped_all(to_dict(config)))), "utf-8")


def _escaped_all(value: Any) -> Any:
    """Return a nested value in which every text is escaped."""
    if isinstance(value, dict):
        return {name: _escaped_all(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped_all(child) for child in value]

    return _escaped(value) if isinstance(value, str) else value


def _check_kinds(source: str, schema: dict, layer: dict, prefix: str = "") -> None:
    """Refuse a list where the schema has a mapping, or the other way round.

    OmegaConf refuses them too, but names no key.
    """
    for name, value in layer.items():
        expected = NAMED_SCHEMAS.get(prefix) or schema.get(name)
        # An interpolation is a string until it is resolved, whatever it stands for.
        is_reference = isinstance(value, str) and value.startswith("${")
        if not isinstance(expected, (dict, list)) or value is None or is_reference:
            continue

        if not isinstance(value, type(expected)):
            kind = "a mapping" if isinstance(expected, dict) else "a list"
            example = "{key: value}" if isinstance(expected, dict) else "[a, b]"
            raise ConfigError(
                f"{source}: {prefix}{name} is {value!r}, must be {kind}; write it as {example}"
            )

        if isinstance(expected, dict) and isinstance(value, dict):
            _check_kinds(source, expected, value, f"{prefix}{name}.")
        elif any(isinstance(item, (dict, list)) for item in value):
            raise ConfigError(f"{source}: {prefix}{name} is {value!r}, must be a flat list")


def _layers(arguments: Sequence[str]) -> Iterable[tuple[str, DictConfig]]:
    for argument in arguments:
        # A file may have "=" in its name.
        # Not Path.exists(), which raises for a text of more than 255 bytes.
        if "=" in argument and not os.path.exists(argument):
            yield f"argument {argument!r}", _override(argument)
        else:
            yield argument, _read_yaml(Path(argument))


def _read_yaml(path: Path) -> DictConfig:
    if os.path.isfile(path / "config.yaml"):
        raise ConfigError(f"{path} is a run, not a yaml file: give {path / 'config.yaml'}")
    # Not path.is_file(), which raises for a text of more than 255 bytes.
    if not os.path.isfile(path):
        raise ConfigError(f"no config file {path}; give a yaml file, or an override as key=value")
    try:
        layer = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not valid yaml: {error}") from error
    except OSError as error:
        # OmegaConf raises it for a lone number, too.
        raise ConfigError(f"{path} cannot be read as a mapping of config keys: {error}") from error
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"{path} holds a {type(layer).__name__}, not a mapping of config keys")
    return layer


def override(key: str, value: str) -> str:
    """Return the argument that gives a key exactly this text, whatever YAML would read in it."""
    # A JSON string is one of YAML's; it may hold quotes and line breaks.
    return f"{key}={json.dumps(_escaped(value), ensure_ascii=False)}"


def _escaped(text: str) -> str:
    """Return a text in which OmegaConf sees no interpolation: `${` stays what it is."""
    # Before one, a backslash stands for itself only when it is doubled.
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)


def _override(argument: str) -> DictConfig:
    key, _, value = argument.partition("=")
    if not re.fullmatch(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*", key):
        raise ConfigError(f"{key!r} is not a config key; write section.key=value")

    text = value.strip()
    # Quotes and null are YAML's. Lists and mappings are refused later, by their key.
    field = _field_of(key)
    is_text = field is not None and field.type in ("str", str)
    is_typed = is_text and text not in NULLS and text[0] not in "'\"[{"
    try:
        if not is_typed:
            return OmegaConf.from_dotlist([argument])
        layer = OmegaConf.create()
        # YAML would make 8 of 010, and `a` of `a #b`.
        OmegaConf.update(layer, key, text)
        return layer
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{argument!r} is not valid: {error}") from error


def all_keys() -> list[str]:
    """List every leaf key of the schema, e.g. `train.num_steps`."""
    return [key for key, _ in flat_texts(SCHEMA)]


def _advice(key: str) -> str:
    """Say what to write instead of an unknown key."""
    if key in RENAMED:
        return f"it is now {RENAMED[key]}"

    section, _, leaf = key.rpartition(".")
    keys = all_keys()
    top, _, rest = key.partition(".")
    is_named = bool(rest) and f"{top}." in NAMED_SCHEMAS
    if leaf in SYNONYMS and not is_named:
        return f"here it is {SYNONYMS[leaf]}"
    if is_named:
        # The schema has no reward or judge by name: all_keys() ends at `reward`.
        keys = [f"{section}.{name}" for name in NAMED_SCHEMAS[f"{top}."]]
    if key in keys:
        return f"in yaml a dot is part of a name; nest it: {_nested(key)}"

    near = difflib.get_close_matches(key, keys, n=1)
    # Else the right key in another section, else a section with a typo.
    near = near or [other for other in keys if other.rpartition(".")[2] == leaf]
    sections = [other.rpartition(".")[0] for other in keys]
    near = near or difflib.get_close_matches(key, sections, n=1)

    return f"did you mean {near[0]}?" if near else "`megadiff train --help-config` lists every key"


def _nested(key: str) -> str:
    """Write a dotted key as yaml has it: `run: {name: …}`."""
    *sections, leaf = key.split(".")
    text = f"{leaf}: …"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return text
