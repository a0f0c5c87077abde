"""A process that builds feature caches in children of its own, which a test may kill; it imports everything only once.

Run by path. Each line on stdin is a command: "build FOLDER WRITERS", or "memory FOLDER". It answers with the children's
process ids, which stay theirs until it gets another line: then it waits for them, and answers with their exit codes (of
a killed one: minus the signal).
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist

from tests.tiny import VOCAB, tiny_target
from train import feature_cache
from train.conversations import TokenRow
from train.feature_cache import FeatureCache, build_feature_cache
from train.features import FeatureSource, read_ahead

SHARD_TOKENS = 900
WIDE_ROWS = 160


def make_rows(count: int = 150, longest: int = 60) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for i in range(count):
        length = int(torch.randint(2, longest, (), generator=generator))
        ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
        rows.append(TokenRow(str(i), tuple(ids), ((1, length),), "t"))
    return rows


def build(source: FeatureSource, folder: str, rank: int, writers: int) -> None:
    if writers > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=writers)
    feature_cache._SHARD_TOKENS = SHARD_TOKENS
    build_feature_cache(source, make_rows(), folder, log=lambda text: None)


class WideTarget:
    """A target that costs nothing: 16 KiB per token, all of them the token's id."""

    name, revision, adapter, adapter_sha256, hidden_size = "wide", None, None, None, 4096
    dtype, device, model, peers = torch.float32, torch.device("cpu"), torch.nn.Module(), None

    def features(self, ids: torch.Tensor, valid: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
        return ids[..., None].float().expand(*ids.shape, self.hidden_size)


def grow(folder: str) -> None:
    """Writes how many MiB the peak of memory grows by while a cache of 160 MiB is made and read in random order."""
    feature_cache._SHARD_TOKENS = 256  # 4 MiB
    rows = [TokenRow(str(i), (i % 500,) * 64, (), "t") for i in range(WIDE_ROWS)]

    def made(count: int) -> FeatureCache:
        source = FeatureSource(WideTarget())  # type: ignore[arg-type]
        return build_feature_cache(source, rows[:count], f"{folder}/{count}", log=lambda text: None)

    made(8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = made(WIDE_ROWS)
    order = torch.randperm(WIDE_ROWS).tolist()
    for one in read_ahead(((0.0, [i]) for i in order), cache, 2):
        assert bool((one.features[0] == one.indices[0] % 500).all())
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(folder, "grown").write_text(str((after - before) / 1024))


def main() -> None:
    torch.set_num_threads(1)  # or the children could not be forked
    source = FeatureSource(tiny_target("llama"), (0, 1))
    source.target.tap(source.taps)
    for line in sys.stdin:
        command, folder, *rest = line.split()
        writers = int(rest[0]) if rest else 1
        children = []
        for rank in range(writers):
            child = os.fork()
            if not child:
                if command == "build":
                    build(source, folder, rank, writers)
                else:
                    grow(folder)
                os._exit(0)
            children.append(child)
        print(*children, flush=True)
        sys.stdin.readline()
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)


if __name__ == "__main__":
    main()
