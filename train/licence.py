"""Under which licence a head is published: that of its target, as the target's card has it, or the one asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load, try_to_load_from_cache

from heads.embedded import EMBEDDED, LICENCE

# Identifiers that the hub knows: https://huggingface.co/docs/hub/repositories-licenses
KNOWN = frozenset(
    """apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma
    other""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Licence:
    """id: of the hub. name, link: of the text, where id is "other". source: who says so, for the card.

    text: the licence's own file in the target's directory, to be published beside the head; None: none at hand.
    """

    id: str
    name: str | None
    link: str | None
    source: str
    text: Path | None = None

    def metadata(self) -> dict[str, Any]:
        named = {"license": self.id, "license_name": self.name, "license_link": self.link}
        return {key: value for key, value in named.items() if value}

    @property
    def title(self) -> str:
        return self.name or self.id


def asked(identifier: str, name: str | None, link: str | None) -> Licence:
    """The licence of the options --license, --license-name, --license-link.

    Raises:
        ValueError: the hub does not know it, or "other" without a name and a link.
    """
    if identifier not in KNOWN:
        raise ValueError(
            f"--license is {identifier!r}, which is no identifier of the hub "
            "(https://huggingface.co/docs/hub/repositories-licenses), such as apache-2.0, llama3.2 or gemma; for "
            "another licence give --license other --license-name NAME --license-link URL"
        )
    if identifier == "other" and not (name and link):
        raise ValueError("--license other needs --license-name NAME and --license-link URL")
    if identifier != "other" and (name or link):
        raise ValueError(f"--license-name and --license-link belong to --license other, not to {identifier!r}")
    if link and not link.startswith("https://"):
        raise ValueError(f"--license-link is {link!r}, expected an address that begins with https://")
    return Licence(identifier, name, link, "chosen by the publisher")


def of_target(target: str, base_model: str, revision: str | None) -> Licence | None:
    """The target's licence, from its card in its directory or in the hub's cache; None: not known here.

    Nothing is downloaded.

    Raises:
        ValueError: the card's metadata cannot be read or names no single licence.
    """
    if target == EMBEDDED:
        return Licence(LICENCE, None, None, "that of the base model")
    cards = [Path(target) / "README.md"] if Path(target).is_dir() else []
    for at in dict.fromkeys((revision, None)):
        cached = try_to_load_from_cache(base_model, "README.md", revision=at)
        cards += [Path(cached)] if isinstance(cached, str) else []
    for card in cards:
        found = _of_card(card, base_model) if card.is_file() else None
        if found is not None:
            return found
    return None


def _of_card(card: Path, base_model: str) -> Licence | None:
    try:
        data: dict[str, Any] = metadata_load(card) or {}
    except Exception as error:  # the hub's library lets through whatever its YAML parser raises
        raise ValueError(f"{card} has metadata that cannot be read ({error}); give --license") from error
    identifier = data.get("license")
    if isinstance(identifier, list) and len(identifier) == 1:
        identifier = identifier[0]
    if identifier in (None, "unknown"):
        return None
    if not isinstance(identifier, str):
        raise ValueError(f"{card} names the licence {identifier!r}, expected one identifier; give --license")
    name, link = (data.get(key) if isinstance(data.get(key), str) else None for key in ("license_name", "license_link"))
    if identifier == "other" and not name:
        raise ValueError(f'{card} has the licence "other" without a license_name; give --license')
    if link and "://" not in link:  # a file of the target's repository
        link = f"https://huggingface.co/{base_model}/blob/main/{link}"
    return Licence(identifier, name, link, "that of the base model", _text_of(card.parent))


def _text_of(folder: Path) -> Path | None:
    names = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")
    return next((folder / name for name in names if (folder / name).is_file()), None)
