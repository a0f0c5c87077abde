"""What the training entries share: arguments, and errors as one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from train.config import RunConfig, load_config


def config_from_args(argv: list[str] | None, prog: str, description: str | None) -> RunConfig:
    """Parses --config and --set. Exits with 2 and one line for a config that is not valid."""
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
        return load_config(args.config, args.set)
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
