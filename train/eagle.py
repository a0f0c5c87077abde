"""Trains an EAGLE head: accelerate launch train/eagle.py --config configs/eagle_smollm2.yaml [--set a.b=value ...]"""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    from train.cli import train_or_plan

    return train_or_plan(argv, "train/eagle.py", __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
