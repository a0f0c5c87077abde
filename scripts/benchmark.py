"""Benchmarks. `decode`: the cost of passes, host overhead, and tokens per second of every way to decode."""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    import argparse
    import sys

    from infer.benchmark import add_decode_options, run_decode
    from train.cli import run_or_explain

    parser = argparse.ArgumentParser(prog="scripts/benchmark.py", description=__doc__)
    parser.add_argument("what", choices=("decode",))
    add_decode_options(parser)
    args = parser.parse_args(argv)
    return run_or_explain(lambda: run_decode(args, sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    raise SystemExit(main())
