"""Shows rows as they are trained on, supervised tokens marked: in the terminal, and as HTML."""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    from pathlib import Path

    from train.cli import config_of, config_parser, run_or_explain

    parser = config_parser("scripts/show_mask.py", __doc__)
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="render these conversations now (default: data.work_dir's prepared rows; without any, data.path)",
    )
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="how many (default: 5)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    args = parser.parse_args(argv)
    if args.rows < 1:
        parser.error(f"--rows is {args.rows}, expected 1 or more")
    config = config_of(parser, args)

    def work() -> None:
        import os
        import sys

        from train.files import write_text
        from train.mask_view import as_html, as_text, shown_rows

        where, rows = shown_rows(config, args.rows, args.data)
        print(f"{where}\n")
        print(as_text(rows, sys.stdout.isatty() and "NO_COLOR" not in os.environ), end="")
        if args.html is not None:
            if not args.html.parent.is_dir():
                raise ValueError(f"--html: {args.html.parent} is not a directory; make it, or choose another file")
            write_text(args.html, as_html(where, rows))
            print(f"page: {args.html}")

    return run_or_explain(work)


if __name__ == "__main__":
    raise SystemExit(main())
