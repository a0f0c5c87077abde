"""Feature caches: made before training, checked against the target, and what int8 features cost."""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    import argparse

    from train import feature_cli
    from train.cli import run_or_explain

    parser = argparse.ArgumentParser(
        prog="scripts/feature_cache.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    shown = []
    for name, add_options, help_text in (
        ("build", feature_cli.add_build_options, "write the caches of a config; damaged shards are made anew"),
        ("verify", feature_cli.add_verify_options, "check all shards, and sampled rows against the target"),
        ("int8", feature_cli.add_int8_options, "a trained head with features as they are and from int8"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        add_options(command)
        shown.append(command.format_help())
    parser.epilog = "\n".join(shown)
    args = parser.parse_args(argv)
    run = {"build": feature_cli.run_build, "verify": feature_cli.run_verify, "int8": feature_cli.run_int8}[args.what]
    return run_or_explain(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
