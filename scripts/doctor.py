"""Says what a head is, which engines load it and what is wrong: python scripts/doctor.py DIR --target embedded"""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    import argparse
    import sys
    from functools import partial

    from infer.doctor import add_doctor_options, run_doctor
    from train.cli import run_or_explain

    parser = argparse.ArgumentParser(prog="scripts/doctor.py", description=__doc__)
    add_doctor_options(parser)
    args = parser.parse_args(argv)
    say = partial(print, file=sys.stderr, flush=True)
    codes: list[int] = []
    return run_or_explain(lambda: codes.append(run_doctor(args, say))) or codes[0]


if __name__ == "__main__":
    raise SystemExit(main())
