"""What the training entries share: arguments, and errors as one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from heads.kinds import KINDS, kind_of
from train.config import RunConfig, load_config


def config_from_args(argv: list[str] | None, prog: str, description: str | None, entry: str | None = None) -> RunConfig:
    """Parses --config and --set. Exits with 2 and one line for a config that is not valid.

    entry: the training command that this is; configs of heads that another one trains are refused.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one field, e.g. --set optim.lr=1e-4; may be repeated",
    )
    args = parser.parse_args(argv)
    try:
        config = load_config(args.config, args.set)
        wanted = kind_of(config.head.kind).entry
        if entry is not None and wanted != entry:
            kinds = ", ".join(name for name, kind in KINDS.items() if kind.entry == entry)
            raise ValueError(
                f"{args.config}: head.kind is {config.head.kind!r}, which {wanted} trains; {entry} trains {kinds}"
            )
        return config
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")


def run_or_explain(work: Callable[[], None]) -> int:
    """Exit code 0, or 1 with the message of a ValueError on stderr."""
    try:
        work()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
