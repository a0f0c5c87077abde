"""Writes a head in the layout of a serving engine: python scripts/export.py --head DIR --to vllm --out DIR"""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse


def _parser() -> argparse.ArgumentParser:
    from heads.formats.export import DTYPES
    from heads.formats.registry import LAYOUTS

    parser = argparse.ArgumentParser(
        prog="scripts/export.py",
        description="Writes a head in the layout of a serving engine, and checks what was written: names, shapes, "
        "dtypes, config, layer ids, draft vocabulary, rotary settings. What a layout cannot express is refused.",
    )
    add = parser.add_argument
    add(
        "--head",
        metavar="DIR",
        required=True,
        help="directory or hub id of a head, ours or in any layout below",
    )
    layouts = "; ".join(f"{name}: {one.engine} ({', '.join(one.kinds)})" for name, one in LAYOUTS.items())
    add("--to", required=True, choices=tuple(LAYOUTS), help=layouts)
    add("--out", metavar="DIR", required=True, help="a new directory, or an earlier export, which is replaced")
    add("--target", help='hub id, directory or "embedded"; default: the one the head was trained for')
    add("--dtype", choices=DTYPES, help="of the written weights; default: as they are")
    add(
        "--whole-vocabulary",
        action="store_true",
        help="for heads with a draft vocabulary that the layout has no place for: the engine drafts from all tokens, "
        "which the head was not trained for, so that it drafts a little differently than here",
    )
    add("--cache-dir", metavar="DIR", help="where the embedded target is kept")
    add("--trust-remote-code", action="store_true", help="run model code from the hub")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)

    from heads.formats.export import ExportRequest, run_export
    from train.cli import run_or_explain

    def work() -> None:
        run_export(ExportRequest(**vars(args)))

    return run_or_explain(work)


if __name__ == "__main__":
    raise SystemExit(main())
