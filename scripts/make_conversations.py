"""Runs the data stage alone: conversations read or invented, answered, tokenised, masked and split."""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    from train.cli import config_from_args, run_or_explain

    config = config_from_args(argv, "scripts/make_conversations.py", __doc__)

    def work() -> None:
        from functools import partial

        from heads.target import pick_device
        from train.stage import prepare_rows

        prepare_rows(config, pick_device(config.target.device), partial(print, flush=True))

    return run_or_explain(work)


if __name__ == "__main__":
    raise SystemExit(main())
