"""Measure what drafting costs on this machine and choose the draft tree."""

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 after an error of the user."""
    import sys

    from infer.calibrate_cli import run

    try:
        return run(argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
