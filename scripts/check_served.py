"""Serves a head in a real engine, beside our own chain: python scripts/check_served.py --head DIR --prompts FILE"""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    import argparse
    import sys
    from functools import partial

    from infer.served import add_served_options, run_served
    from train.cli import run_or_explain

    parser = argparse.ArgumentParser(prog="scripts/check_served.py", description=__doc__)
    add_served_options(parser)
    args = parser.parse_args(argv)
    say = partial(print, file=sys.stderr, flush=True)
    return run_or_explain(lambda: run_served(args, sys.argv[1:] if argv is None else argv, say))


if __name__ == "__main__":
    raise SystemExit(main())
