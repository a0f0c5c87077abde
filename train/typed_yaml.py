"""Typed configs: frozen dataclasses to and from dictionaries and YAML, strictly.

Unknown keys, wrong types and repeated keys are errors that name the dotted field. `dump_yaml` and `parse_yaml` with
`from_dict` are exact inverses.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")


# --- dictionaries -------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")


def _type_name(hint: Any) -> str:
    """A type as a user would write it: `int or null`, `one of "auto", "no"`, `a list of 2: float, float`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a list of {_type_name(args[0])}"
        return f"a list of {len(args)}: " + ", ".join(_type_name(arg) for arg in args)
    if dataclasses.is_dataclass(hint) or origin is dict:
        return "a section (key: value pairs)"
    return {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}.get(hint, str(hint))


def _mismatch(path: str, value: object, hint: Any) -> ValueError:
    extra = ""
    if str in (hint, *get_args(hint)) and isinstance(value, (int, float)):
        extra = ' (put it in quotes to make it a string, in --set inside the value: a.b="1")'
    return ValueError(
        f"{path} is {value!r} ({type(value).__name__}), expected {_type_name(hint)}{extra}; change {path}"
    )


def _coerce(value: Any, hint: Any, path: str, root: Any) -> Any:
    """`value` as the type `hint`, without guessing: only int to float, "1e-4" to float, and list to tuple."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        assert len(inner) == 1, f"{path}: only Optional unions are supported, not {hint}"
        if value is None:
            if len(inner) < len(args):
                return None
            raise _mismatch(path, value, hint)
        try:
            return _coerce(value, inner[0], path, root)
        except ValueError:
            if get_origin(inner[0]) is None and not dataclasses.is_dataclass(inner[0]):
                raise _mismatch(path, value, hint) from None  # so that the message says "or null"
            raise
    if origin is Literal:
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
        raise _mismatch(path, value, hint)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _mismatch(path, value, hint)
        item_hints = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(item_hints) != len(value):
            raise _mismatch(path, value, hint)
        pairs = zip(value, item_hints, strict=True)
        return tuple(_coerce(item, item_hint, f"{path}[{i}]", root) for i, (item, item_hint) in enumerate(pairs))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if value is None:  # "optim:" with every line under it commented out
            value = {}
        if not isinstance(value, Mapping):
            raise _mismatch(path, value, hint)
        return from_dict(hint, value, path, root)
    if hint is float:
        return _coerce_float(value, path)
    if origin is dict:
        if value is not None and not isinstance(value, Mapping):
            raise _mismatch(path, value, hint)
        return _free_form(value or {}, path)
    if hint in (int, str, bool):
        if type(value) is hint:  # exact: True is not an int here
            return value
        raise _mismatch(path, value, hint)
    raise AssertionError(f"{path}: the field type {hint} is not supported")


def _free_form(value: Any, path: str) -> Any:
    """A copy of what YAML and JSON can hold, whatever it is; keys must be strings."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r}, expected strings as keys; put it in quotes")
        return {key: _free_form(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_free_form(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"{path} is {value!r} ({type(value).__name__}), expected text, numbers, lists or a section")


def _coerce_float(value: Any, path: str) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value.replace("_", ""))  # PyYAML reads 1e-4 (no dot) as a string
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _mismatch(path, value, float)
    if not abs(value) <= sys.float_info.max:  # nan, inf, or a whole number beyond both
        raise _mismatch(path, value, float)
    return float(value)


def _leaf_paths(cls: Any, prefix: str = "") -> list[str]:
    """Every dotted key under a config class, sections included."""
    found = []
    for name, hint in get_type_hints(cls).items():
        found.append(f"{prefix}{name}")
        if dataclasses.is_dataclass(hint):
            found += _leaf_paths(hint, f"{prefix}{name}.")
    return found


def _unknown_key(key: object, cls: Any, path: str, root: Any) -> ValueError:
    """Error for a key that `cls` lacks, with the nearest key there, or the same key in another section."""
    prefix = f"{path}." if path else ""
    names = [f.name for f in dataclasses.fields(cls)]
    near = [prefix + name for name in difflib.get_close_matches(str(key), names, n=1, cutoff=0.6)]
    if not near:
        elsewhere = [dotted for dotted in _leaf_paths(root) if dotted.split(".")[-1] == key]
        deeper = [dotted for dotted in _leaf_paths(cls, prefix) if dotted.split(".")[-1] == key]
        near = deeper or elsewhere
    hint = f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(names)}"
    return ValueError(f"unknown key {prefix}{key}; {hint}")


def from_dict(cls: type[T], data: Mapping[str, Any], path: str = "", root: type | None = None) -> T:
    """Build the dataclass `cls` from nested mappings, strictly.

    `path` is the dotted prefix used in messages, `root` the whole config's class, in which a key that is in the wrong
    section is looked for. Raises ValueError for an unknown key (with the nearest
    match), a wrong type, a missing required field, or a value that the dataclass itself refuses.
    """
    assert dataclasses.is_dataclass(cls), f"{cls} is not a dataclass"
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in fields:
            raise _unknown_key(key, cls, path, root or cls)
        values[key] = _coerce(value, hints[key], f"{path}.{key}" if path else key, root or cls)
    for name, spec in fields.items():
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{path + '.' if path else ''}{name} is missing, expected {_type_name(hints[name])}")
    return cls(**values)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dicts, lists and scalars: what JSON and YAML can hold. Inverse of `from_dict`."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return value

    result = plain(config)
    assert isinstance(result, dict), f"{config!r} is not a dataclass instance"
    return result


# --- YAML ---------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2: `no` is a string, `1e-4` a number, `010` and `1:30` strings.

    PyYAML follows YAML 1.1, where `mixed_precision: no` is false and `lr: 1e-4` a string. Repeated keys are
    errors.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise ValueError(f"line {key_node.start_mark.line + 1}: the key {key_node.value!r} is there twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly what `_Loader` would not read back as a string."""


_Loader.yaml_implicit_resolvers, _Dumper.yaml_implicit_resolvers = {}, {}  # drop those of YAML 1.1
for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", rf"(?=.*[.eE]){_NUMBER.pattern}", list("-+.0123456789")),
):
    for _cls in (_Loader, _Dumper):
        # \Z, not $: a value ending in a newline is not a number
        _cls.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    """Line breaks of Unicode are written as escapes: read back plain, PyYAML would make spaces of them."""
    style = '"' if any(char in value for char in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def parse_yaml(text: str) -> Any:
    """One YAML document as plain Python values. Raises ValueError for malformed YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error


def dump_yaml(config: Any) -> str:
    """The whole config, defaults included, as YAML that `load_config` reads back to an equal object."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `dotted.key=value` set; the value is read as YAML, later ones win.

    Raises ValueError where an item has no `=`, or runs through a key that is not a section.
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    for item in overrides:
        dotted, equals, text = item.partition("=")
        parts = dotted.strip().split(".")
        if not equals or not all(parts):
            raise ValueError(f"override {item!r}, expected section.field=value, for example optim.lr=1e-4")
        node = result
        for i, part in enumerate(parts[:-1]):
            if node.get(part) is None:
                node[part] = {}
            if not isinstance(node[part], dict):
                raise ValueError(f"override {item!r}: {'.'.join(parts[: i + 1])} is a value, not a section")
            node = node[part]
        node[parts[-1]] = parse_yaml(text)
    return result
