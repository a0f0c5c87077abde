"""Shards of a feature cache: which rows are where, how features are stored, files written, checked and read.

A shard is a safetensors file with the features of consecutive rows, concatenated over their tokens. Its record, the
size and SHA-256 of the whole file, is written before the file gets its name, so no shard is ever there without one.

Shapes: n tokens, C columns (the feature after the final norm, then the tapped layers) of their widths, W their sum.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from train.files import temporary, write_text

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8"}  # in the files' headers
_HEADER_LIMIT = 1 << 20  # bytes; ours have about a hundred


class Layout:
    """Where rows lie, known from their lengths alone: consecutive rows share a shard up to a number of tokens."""

    def __init__(self, lengths: Sequence[int], shard_tokens: int) -> None:
        self._start = np.zeros(len(lengths) + 1, dtype=np.int64)  # tokens before each row
        np.cumsum(lengths, out=self._start[1:])
        first: list[int] = []
        for row, end in enumerate(self._start[1:].tolist()):
            if not first or end - self._start[first[-1]] > shard_tokens:
                first.append(row)
        self._first = np.asarray([*first, len(lengths)], dtype=np.int64)  # first row of each shard

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._first) - 1

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self._start) - 1

    def rows(self, shard: int) -> range:
        return range(int(self._first[shard]), int(self._first[shard + 1]))

    def tokens(self, shard: int) -> int:
        return int(self._start[self._first[shard + 1]] - self._start[self._first[shard]])

    def place(self, row: int) -> tuple[int, int, int]:
        """(shard, first token in it, token behind the last) of a row."""
        shard = int(np.searchsorted(self._first, row, side="right")) - 1
        before = self._start[self._first[shard]]
        return shard, int(self._start[row] - before), int(self._start[row + 1] - before)


@dataclass(frozen=True)
class Form:
    """How a token's features are stored: as they are, or in int8 with a scale per token and column.

    int8: value * scale with scale = max |x| / 127 of that token and column, so every value is at most scale / 2 off.
    dtype: of what is read.
    """

    widths: tuple[int, ...]
    dtype: torch.dtype
    int8: bool = False

    @property
    def parts(self) -> dict[str, tuple[torch.dtype, int]]:
        """Tensors of a shard: dtype, and values per token."""
        if not self.int8:
            return {"features": (self.dtype, sum(self.widths))}
        return {"features": (torch.int8, sum(self.widths)), "scale": (torch.float32, len(self.widths))}

    @property
    def bytes_per_token(self) -> int:
        return sum(dtype.itemsize * width for dtype, width in self.parts.values())

    def encode(self, features_nW: Tensor) -> dict[str, Tensor]:
        if not self.int8:
            return {"features": features_nW}
        columns = features_nW.float().split(self.widths, -1)
        scale_nC = torch.stack([column.abs().amax(-1) / 127 for column in columns], -1)
        scale_nC = scale_nC.where(scale_nC > 0, 1.0)
        values = [(x / scale_nC[:, c, None]).round().clamp(-127, 127) for c, x in enumerate(columns)]
        return {"features": torch.cat(values, -1).to(torch.int8), "scale": scale_nC}

    def decode(self, parts: dict[str, Tensor]) -> Tensor:
        if not self.int8:
            return parts["features"]
        columns = parts["features"].float().split(self.widths, -1)
        return torch.cat([x * parts["scale"][:, c, None] for c, x in enumerate(columns)], -1).to(self.dtype)


@dataclass(frozen=True)
class Record:
    """Size in bytes and SHA-256 of a shard's file."""

    bytes: int
    sha256: str


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def record_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


def write_shard(folder: Path, number: int, parts: dict[str, Tensor]) -> None:
    """Writes a shard and its record; at any moment the file is whole or not there.

    Raises:
        ValueError: it cannot be written.
    """
    path = shard_path(folder, number)
    folder_tmp = temporary(path)  # a directory: the library writes under a name of its own first
    tmp = folder_tmp / path.name
    try:
        folder_tmp.mkdir(exist_ok=True)
        save_file(parts, tmp)
        with tmp.open("rb+") as file:
            os.fsync(file.fileno())
            record = Record(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
        write_text(record_path(folder, number), json.dumps(asdict(record)) + "\n")
        os.replace(tmp, path)
        folder_tmp.rmdir()
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder_tmp, ignore_errors=True)
        raise ValueError(f"data.work_dir: {path} cannot be written ({error}); make room, then run again") from error


def find_fault(
    folder: Path, number: int, form: Form, tokens: int, record: Record | None, checksum: bool = True
) -> str | None:
    """What is wrong with a shard: "missing" (also one without a record), or how it is damaged; None: nothing is.

    checksum: read it whole. Without, its size and header alone are looked at.
    """
    path = shard_path(folder, number)
    if record is None or not path.is_file():
        return "missing"
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{size} bytes, expected {record.bytes}"
        _offsets(path, form, tokens)
        found = record.sha256
        if checksum:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        return str(error)
    return None if found == record.sha256 else f"SHA-256 {found[:12]}.., expected {record.sha256[:12]}.."


class ShardReader:
    """Reads ranges of tokens out of a shard, and nothing else: files are not mapped, so no memory grows."""

    def __init__(self, path: Path, form: Form, tokens: int) -> None:
        self._path, self._form = path, form
        try:
            self._offsets = _offsets(path, form, tokens)
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error

    def read(self, start: int, end: int) -> Tensor:
        """Features [end - start, W]; raises ValueError if they cannot be read."""
        parts = {}
        try:
            with self._path.open("rb", buffering=0) as file:
                for name, (dtype, width) in self._form.parts.items():
                    data = bytearray((end - start) * width * dtype.itemsize)
                    file.seek(self._offsets[name] + start * width * dtype.itemsize)
                    if file.readinto(data) != len(data):
                        raise ValueError("it ends too early")
                    parts[name] = torch.frombuffer(data, dtype=dtype).view(end - start, width)
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        return self._form.decode(parts)

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(f"feature cache: {self._path} is damaged ({error}); run again to make it anew")


def _offsets(path: Path, form: Form, tokens: int) -> dict[str, int]:
    """Where in the file each tensor begins; raises ValueError if the header is not that of such a shard."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            raise ValueError(f"a header of {length} bytes")
        header: Any = json.loads(file.read(length))  # its errors are ValueErrors, too
    wanted = {name: (_NAMES[dtype], [tokens, width]) for name, (dtype, width) in form.parts.items()}
    try:
        found = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
        begins = {name: int(entry["data_offsets"][0]) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError("a header that is none") from error
    if found != wanted:
        raise ValueError(f"it holds {found}, expected {wanted}")
    return {name: 8 + length + begin for name, begin in begins.items()}
