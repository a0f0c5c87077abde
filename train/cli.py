"""What the training entries share: arguments, and errors as one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from heads.kinds import KINDS, kind_of
from train.config import RunConfig, load_config
from train.plan_cli import add_plan_options, check_plan_options


def config_from_args(argv: list[str] | None, prog: str, description: str | None) -> RunConfig:
    """Parses --config, --set and --endpoint; see `config_of`."""
    parser = config_parser(prog, description)
    _add_endpoint(parser)
    return config_of(parser, parser.parse_args(argv))


def config_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that knows --config and --set."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add_config_options(parser)
    return parser


def config_of(parser: argparse.ArgumentParser, args: argparse.Namespace, entry: str | None = None) -> RunConfig:
    """The config that was asked for. Exits with 2 and one line if it is not valid.

    entry: the training command that this is; configs of heads that another one trains are refused.
    """
    endpoint = getattr(args, "endpoint", None)
    try:
        config = load_config(args.config, args.set + ([f"data.endpoint={endpoint}"] if endpoint else []))
        wanted = kind_of(config.head.kind).entry
        if entry is not None and wanted != entry:
            kinds = ", ".join(name for name, kind in KINDS.items() if kind.entry == entry)
            raise ValueError(
                f"{args.config}: head.kind is {config.head.kind!r}, which {wanted} trains; {entry} trains {kinds}"
            )
        return config
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")


def train_or_plan(argv: list[str] | None, entry: str, description: str | None) -> int:
    """What a training entry does; returns its exit code. Configs of heads that another one trains are refused."""
    parser = config_parser(f"accelerate launch {entry}", description)
    _add_endpoint(parser)
    plans = parser.add_argument_group("planning")
    plans.add_argument(
        "--plan", action="store_true", help="print memory and time of the run, from the config alone, and do nothing"
    )
    add_plan_options(plans)
    args = parser.parse_args(argv)
    config = config_of(parser, args, entry)
    try:
        check_plan_options(args)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")

    def work() -> None:
        if args.plan:
            from train.plan_report import plan_from_args

            if os.environ.get("RANK", "0") == "0":
                print(plan_from_args(config, args))
        else:
            from train.loop import train

            train(config)

    return run_or_explain(work)


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint", metavar="URL", help="OpenAI-compatible server that answers the prompts: short for data.endpoint"
    )


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """--config and --set."""
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one field, e.g. --set optim.lr=1e-4; may be repeated",
    )


def run_or_explain(work: Callable[[], None]) -> int:
    """Exit code 0, or 1 with the message of a ValueError on stderr."""
    try:
        work()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
