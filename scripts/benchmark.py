"""Benchmarks: decoding, a training step, training in several processes, and the generation of answers."""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    import argparse
    import sys

    from infer.benchmark import add_decode_options, run_decode
    from train.benchmark import add_train_options, run_train
    from train.cli import run_or_explain
    from train.generate_benchmark import add_generate_options, run_generate
    from train.scaling import add_scale_options, run_scale

    parser = argparse.ArgumentParser(
        prog="scripts/benchmark.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    shown = []
    for name, add_options, help_text in (
        (
            "decode",
            add_decode_options,
            "the cost of passes, host overhead, tokens per second of all ways to decode",
        ),
        ("train", add_train_options, "training steps of the EAGLE kinds against dense ones: speed, memory, FLOPs"),
        ("scale", add_scale_options, "training steps of one process and of several: what the others gain"),
        ("generate", add_generate_options, "answers of many prompts against the library's batched generate"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        add_options(command)
        shown.append(command.format_help())
    parser.epilog = "\n".join(shown)
    args = parser.parse_args(argv)
    run = {"decode": run_decode, "train": run_train, "scale": run_scale, "generate": run_generate}[args.what]
    return run_or_explain(lambda: run(args, sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    raise SystemExit(main())
