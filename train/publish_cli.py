"""The command line of `scripts/publish.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants

from heads.formats.export import export_head, target_of
from heads.formats.opening import NATIVE, open_head
from heads.formats.registry import LAYOUTS, layout_of
from infer.report import aligned
from train.publish_facts import Asked, Facts, naming_advice, read_facts
from train.publish_folder import CARD, Export, PublishFile, build_folder, check_folder, publish_files
from train.publish_upload import Upload, upload

_AUTO, _USUAL = "auto", ("vllm", "sglang", "hydra")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="publish.py",
        description="Makes the folder of a head that others can use, with a model card from what is on disk, and shows "
        "it; with --upload, sends it to the hub in one commit. Without --upload nothing touches the network.",
    )
    add = parser.add_argument_group("head").add_argument
    add("--head", metavar="DIR", required=True, help="a head written by training, or the directory of its run")
    beside = "an evaluation of it (generate.py --eval --json), several times if need be; those beside it are found"
    add("--report", metavar="FILE", action="append", default=[], help=beside)
    add = parser.add_argument_group("card").add_argument
    add("--base-model", metavar="ID", help="the target's id on the hub; default: what the head was trained for")
    add("--license", metavar="ID", help="default: that of the target's card; without one it must be given")
    add("--license-name", metavar="NAME", help="with --license other")
    add("--license-link", metavar="URL", help="with --license other")
    add = parser.add_argument_group("layouts").add_argument
    layouts = ", ".join(LAYOUTS)
    add(
        "--to",
        default=_AUTO,
        metavar="NAMES",
        help=f"of {layouts}, several with commas, or {NATIVE}: none. The first lies at the root of the repository, "
        f"where engines look. {_AUTO} (default): those of {', '.join(_USUAL)} that can hold the head",
    )
    add("--target", help='hub id, directory or "embedded"; default: the one the head was trained for')
    add("--whole-vocabulary", action="store_true", help="as in scripts/export.py")
    add("--cache-dir", metavar="DIR", help="where the embedded target is kept")
    add("--trust-remote-code", action="store_true", help="run model code from the hub")
    add = parser.add_argument_group("hub").add_argument
    add("--repo", metavar="NAMESPACE/NAME", required=True, help="where it goes")
    add("--out", metavar="DIR", help="the folder; default: DIR_hub beside the head's DIR")
    add("--upload", action="store_true", help="send it; the token is that of hf auth login, or HF_TOKEN")
    add("--private", action="store_true", help="a repository that is made is private; one that is public is refused")
    add("--prune", action="store_true", help="remove files of the repository that the folder does not have")
    return parser


def run(argv: Sequence[str] | None = None) -> None:
    """Builds the folder, shows it, and uploads it if asked.

    Raises:
        ValueError: anything that is missing or wrong, before anything is written; what the hub refuses.
    """
    args = build_parser().parse_args(argv)
    asked = Asked(
        args.head, args.repo, args.base_model, args.license, args.license_name, args.license_link, args.report
    )
    facts = read_facts(asked)
    out = Path(args.out) if args.out else facts.folder.absolute().with_name(f"{facts.folder.absolute().name}_hub")
    check_folder(out)
    with _without_network():
        build_folder(facts, _layouts(args.to, facts.config.kind), _exporter(args, facts), out)
    files = publish_files(out)
    print((out / CARD).read_text(encoding="utf-8"))
    _show(out, files)
    advice = naming_advice(facts.repo, facts.config.kind)
    if advice:
        _say(f"advice: {advice}")
    if not args.upload:
        _say(_plan(args, files))
        return
    message = f"{facts.config.kind} draft head for {facts.base_model}"
    upload(Upload(args.repo, files, message, private=args.private, prune=args.prune), _say)


def _layouts(to: str, kind: str) -> list[str]:
    """Raises ValueError for an unknown one, or one that has no such heads."""
    if to == NATIVE:
        return []
    if to == _AUTO:
        return [name for name in _USUAL if kind in LAYOUTS[name].kinds]
    names = list(dict.fromkeys(to.split(",")))
    for name in names:
        layout_of(name).form(kind)
    return names


def _exporter(args: argparse.Namespace, facts: Facts) -> Export:
    """Of layouts that were chosen by us, what cannot hold the head is left out; of those asked for, it is an error."""

    name, adapter = args.target or facts.config.target, None if facts.adapter is None else str(facts.adapter)
    revision = facts.config.target_revision if name == facts.config.target else None
    where = {"trust_remote_code": args.trust_remote_code, "cache_dir": args.cache_dir}

    def export(layout: str, head: Path, out: Path) -> bool:
        try:
            target = replace(target_of(name, revision, adapter, **where), name=facts.base_model)
            opened = open_head(str(head))
            export_head(opened, layout_of(layout), target, out, whole_vocabulary=args.whole_vocabulary)
        except ValueError as error:
            if args.to != _AUTO:
                raise
            _say(f"left out: layout {layout}: {error}")
            return False
        return True

    return export


@contextmanager
def _without_network() -> Iterator[None]:
    """Within it the hub's library reads its cache alone."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _show(out: Path, files: Sequence[PublishFile]) -> None:
    total = sum(file.size for file in files)
    rows = [["file", "bytes", "sha256"], *([f.name, f"{f.size:,}", f.sha256[:12]] for f in files)]
    print("\n".join([f"{out}:", *aligned([*rows, ["in all", f"{total:,}", ""]])]), flush=True)


def _plan(args: argparse.Namespace, files: Sequence[PublishFile]) -> str:
    kind = "a private" if args.private else "a public"
    drop = ", and remove files that are not in it" if args.prune else ""
    return (
        f"dry run, nothing was sent. With --upload: make {kind} repository {args.repo} if there is none, and send "
        f"those of the {len(files)} files that differ from what it has{drop}, in one commit"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
