"""Rows of data sets as they are stored, one after the other, never a whole file in memory.

JSON and plain text are read here, line by line: Arrow would force one type on every column and fill tool arguments
with nulls. Everything else (parquet, CSV, compressed files, directories, hub ids) goes through `datasets`, streaming.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from train.config import SourceConfig
from train.layouts import is_transcript

Row = tuple[Any, float | None]  # a row, and the share of its source read so far, where that is known

_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".gz": "json", ".zst": "json", ".arrow": "arrow"}
_JSON = (".jsonl", ".ndjson", ".json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_DIVIDER = re.compile(r"-{8,}\s*")  # between the texts of a .txt file
_GAP = re.compile(r"[ \t\r\n,]*")  # between the elements of an array
_CHUNK = 1 << 20  # bytes
_LONGEST_ROW = 1 << 26  # characters of one element of a JSON array


def raw_rows(source: SourceConfig, field: str = "data.path") -> Iterator[Row]:
    """Rows of a file, directory or hub data set: mappings, or strings.

    Raises ValueError, naming `field`, for what cannot be read or is no row; with its line for JSON lines.
    """
    path = Path(source.path)
    if path.is_file() and path.suffix.lower() not in _BUILDERS:
        try:
            yield from _text(path) if path.suffix.lower() == ".txt" else _json(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{field}: {source.path!r} cannot be read as UTF-8 text ({error})") from error
    elif path.exists():
        yield from _datasets(source, field)
    elif path.suffix.lower() in (*_BUILDERS, *_JSON, ".txt") or not _HUB_ID.fullmatch(source.path):
        raise ValueError(
            f"{field}: {source.path!r} cannot be read: neither a file nor a directory; expected one, or a hub id"
        )
    else:
        yield from _datasets(source, field)


def fingerprint(source: SourceConfig) -> str | None:
    """Hash of the contents of a file or a directory; None for a hub id, which `revision` pins."""
    path = Path(source.path)
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        if file != path:
            digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while block := content.read(_CHUNK):
                digest.update(block)
    return digest.hexdigest()


# --- JSON and text ------------------------------------------------------------------------------------------


def _json(path: Path) -> Iterator[Row]:
    """JSON lines, or one array, whatever the name says."""
    with path.open("rb") as file:
        start = file.read(_CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()
    return _array(path) if start.startswith(b"[") else _lines(path)


def _lines(path: Path) -> Iterator[Row]:
    size, done = max(1, path.stat().st_size), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):  # of bytes: U+2028 may stand inside a JSON string
            done += len(line)
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                yield _loaded(text, f"{path}, line {number}"), done / size


def _loaded(text: str, where: str) -> Any:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error}); expected one JSON object a line") from error
    return _row(row, where)


def _row(row: object, where: str) -> Any:
    if not isinstance(row, (dict, str)):
        raise ValueError(f"{where}: {type(row).__name__}, expected a JSON object, or a string (a prompt)")
    return row


def _array(path: Path) -> Iterator[Row]:
    """The elements of a JSON array, decoded one by one from a window of the text."""
    decoder, size, number = json.JSONDecoder(), max(1, path.stat().st_size), 0
    with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
        text, at = file.read(_CHUNK).lstrip(), 1  # behind the bracket
        while True:
            at = _GAP.match(text, at).end()  # type: ignore[union-attr]
            if text.startswith("]", at):
                if (text[at + 1 :] + file.read(_CHUNK)).strip():
                    raise ValueError(f"{path}: text after the array, expected one JSON array, or an object a line")
                return
            try:
                row, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                text, at = text[at:], 0
                more = file.read(max(_CHUNK, len(text))) if len(text) < _LONGEST_ROW else ""
                if not more:
                    raise ValueError(f"{path}, element {number}: not valid JSON ({error.msg})") from error
                text += more
                continue
            yield _row(row, f"{path}, element {number}"), min(1.0, raw.tell() / size)
            number += 1


def _text(path: Path) -> Iterator[Row]:
    """The texts between lines of hyphens; where there are none, a whole transcript, or a prompt a line."""
    size, done = max(1, path.stat().st_size), 0
    with path.open(encoding="utf-8-sig") as file:
        head = file.read(_CHUNK)
    whole = bool(re.search(rf"^{_DIVIDER.pattern}$", head, re.M)) or is_transcript(head)
    block: list[str] = []
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            done += len(line.encode())
            if whole and not _DIVIDER.fullmatch(line):
                block.append(line)
                continue
            text = "".join(block).strip() if whole else line.strip()
            block = []
            if text:
                yield text, done / size
    if text := "".join(block).strip():
        yield text, 1.0


# --- datasets -----------------------------------------------------------------------------------------------


def _datasets(source: SourceConfig, field: str) -> Iterator[Row]:
    import datasets  # seconds to import, and most runs read JSON

    path = Path(source.path)
    try:
        if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(str(path))
            if isinstance(rows, datasets.DatasetDict):
                if source.split not in rows:
                    raise ValueError(f"split {source.split!r} is not there, only {', '.join(rows)}")
                rows = rows[source.split]
        elif path.is_file():
            options = {"delimiter": "\t"} if path.suffix.lower() == ".tsv" else {}
            kind = _BUILDERS[path.suffix.lower()]
            rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True, **options)
        else:
            rows = datasets.load_dataset(
                source.path, source.subset, split=source.split, revision=source.revision, streaming=True
            )
        if path.exists() and isinstance(rows, datasets.IterableDataset):
            rows = rows.reshard()  # parquet by row group: else Arrow decodes far ahead, up to a whole file
        total = rows.info.splits[source.split].num_examples if source.split in (rows.info.splits or {}) else None
        for number, row in enumerate(rows, 1):
            yield _without_nulls(row), number / total if total else None
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        what = "" if path.exists() else " is neither a file nor a directory here, and as a hub data set"
        raise ValueError(
            f"{field}: {source.path!r}{what} cannot be read ({type(error).__name__}: {error}); "
            "change it, its split or its subset"
        ) from error


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object the keys of all others, with nulls: those are taken off again."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
