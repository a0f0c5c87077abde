"""Publish a head: its folder with a model card, shown; with --upload, on the hub."""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    from train.cli import run_or_explain
    from train.publish_cli import run

    return run_or_explain(lambda: run(argv))


if __name__ == "__main__":
    raise SystemExit(main())
