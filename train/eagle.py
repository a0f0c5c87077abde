"""Trains an EAGLE head: accelerate launch train/eagle.py --config configs/eagle_smollm2.yaml [--set a.b=value ...]"""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    from train.cli import config_from_args, run_or_explain

    config = config_from_args(argv, "accelerate launch train/eagle.py", __doc__, "train/eagle.py")

    def work() -> None:
        from train.loop import train

        train(config)

    return run_or_explain(work)


if __name__ == "__main__":
    raise SystemExit(main())
