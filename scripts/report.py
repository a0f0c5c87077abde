"""Write the report of training runs, finished or not: report.png and report.html in each run's directory."""

from __future__ import annotations

if __package__ in (None, ""):  # run by path: put the repository root first, drop this folder
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from train.cli import run_or_explain
    from train.report import PNG, write_report

    parser = argparse.ArgumentParser(prog="report.py", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="train.output_dir of a run")
    args = parser.parse_args(argv)

    def work() -> None:
        for run in args.runs:
            page = write_report(run)
            print(f"report: {page}, {page.with_name(PNG)}")

    return run_or_explain(work)


if __name__ == "__main__":
    raise SystemExit(main())
