"""Compares heads for one target: python scripts/compare_heads.py --head DIR --with DIR --prompts FILE"""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    import argparse
    import sys
    from functools import partial

    from infer.compare import add_compare_options, run_compare
    from train.cli import run_or_explain

    parser = argparse.ArgumentParser(prog="scripts/compare_heads.py", description=__doc__)
    add_compare_options(parser)
    args = parser.parse_args(argv)
    say = partial(print, file=sys.stderr, flush=True)
    return run_or_explain(lambda: run_compare(args, sys.argv[1:] if argv is None else argv, say))


if __name__ == "__main__":
    raise SystemExit(main())
