"""Converts the embedded target (SmolLM2-135M-Instruct from a PyPI wheel) to a transformers directory, once."""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="scripts/prepare_target.py", description=__doc__)
    parser.add_argument("--cache-dir", help="default: $DRAFTSMITH_CACHE, else ~/.cache/draftsmith")
    args = parser.parse_args(argv)
    from train.cli import run_or_explain

    def work() -> None:
        from heads.embedded import prepare_embedded

        print(f"embedded target: {prepare_embedded(args.cache_dir)}")

    return run_or_explain(work)


if __name__ == "__main__":
    raise SystemExit(main())
