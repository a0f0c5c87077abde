"""How a published head is served, engine by engine: the lines of its card."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heads.checkpoint import ADAPTER
from heads.formats.for_sglang import TOKEN_MAP
from heads.formats.opening import NATIVE
from train.publish_facts import Facts


@dataclass(frozen=True)
class Place:
    """Where a layout lies in the repository. layout: "native" is ours. folder: "" is the root."""

    layout: str
    folder: str


def serve_lines(facts: Facts, places: Sequence[Place]) -> list[str]:
    """Markdown: a section for every layout in the repository."""
    lines: list[str] = []
    if facts.adapter is not None:
        lines += [*_merge_lines(facts), ""]
    for place in places:
        title, text = _ENGINES[place.layout](facts, place)
        lines += [f"### {title}", "", *text, ""]
    if all(place.layout == NATIVE for place in places):
        lines += ["The files are in Draftsmith's own layout, which other engines do not load.", ""]
    return lines[:-1]


def _merge_lines(facts: Facts) -> list[str]:
    return [
        "Draftsmith merges the adapter while it loads the target. Other engines need the adapted target as a model:",
        "",
        *_code(
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{facts.base_model}", dtype="auto")',
            f'adapted = PeftModel.from_pretrained(base, "{facts.repo}", subfolder="{ADAPTER}")',
            'adapted.merge_and_unload().save_pretrained("adapted")',
            f'AutoTokenizer.from_pretrained("{facts.base_model}").save_pretrained("adapted")',
            language="python",
        ),
    ]


def _target(facts: Facts) -> str:
    return facts.base_model if facts.adapter is None else "adapted"


def _code(*lines: str, language: str = "") -> list[str]:
    return [f"```{language}", *lines, "```"]


def _fetch(facts: Facts, place: Place) -> tuple[str, str]:
    """The command that brings the layout into a directory, and that directory."""
    only = f" --include '{place.folder}/*'" if place.folder else ""
    return f"hf download {facts.repo}{only} --local-dir {facts.name}", "/".join(
        filter(None, (facts.name, place.folder))
    )


def _model(facts: Facts, place: Place) -> tuple[list[str], str]:
    """What an engine is given as the draft model: the repository itself, or a directory that is fetched before."""
    if not place.folder:
        return [], facts.repo
    command, folder = _fetch(facts, place)
    return [command], folder


# ---- engines -----------------------------------------------------------------------------------------------


def _native(facts: Facts, place: Place) -> tuple[str, list[str]]:
    command = f'python infer/generate.py --head {facts.repo} --prompt "What is a haiku?"'
    return "Draftsmith", ["In a checkout of Draftsmith:", "", *_code(command, language="bash")]


def _vllm(facts: Facts, place: Place) -> tuple[str, list[str]]:
    before, model = _model(facts, place)
    settings = {"method": facts.config.kind, "model": model, "num_speculative_tokens": facts.drafts}
    serve = f"vllm serve {_target(facts)} --speculative-config '{json.dumps(settings)}'"
    return "vLLM", _code(*before, serve, language="bash")


def _sglang(facts: Facts, place: Place) -> tuple[str, list[str]]:
    before, model = _model(facts, place)
    serve = [
        f"python -m sglang.launch_server --model-path {_target(facts)} \\",
        f"  --speculative-algorithm {facts.config.kind.upper()} --speculative-draft-model-path {model} \\",
        f"  --speculative-num-steps {facts.drafts} --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
    ]
    if facts.config.kind == "eagle" and facts.config.draft_vocab_size is not None:
        serve[-1] += f" \\\n  --speculative-token-map {model}/{TOKEN_MAP}"
    return "SGLang", _code(*before, *serve, language="bash")


def _speculators(facts: Facts, place: Place) -> tuple[str, list[str]]:
    before, model = _model(facts, place)
    return "vLLM, from the speculators layout", _code(*before, f"vllm serve {model}", language="bash")


def _trtllm(facts: Facts, place: Place) -> tuple[str, list[str]]:
    command, folder = _fetch(facts, place)
    kind = "Medusa" if facts.config.kind == "medusa" else "Eagle"
    options = {"decoding_type": kind, "max_draft_len": facts.drafts, "speculative_model_dir": folder}
    file = f"echo 'speculative_config: {json.dumps(options)}' > draft.yaml"
    serve = f"trtllm-serve {_target(facts)} --extra_llm_api_options draft.yaml"
    return "TensorRT-LLM", _code(command, file, serve, language="bash")


def _eagle(facts: Facts, place: Place) -> tuple[str, list[str]]:
    command, folder = _fetch(facts, place)
    load = f'EaModel.from_pretrained(base_model_path="{_target(facts)}", ea_model_path="{folder}"'
    load += f", use_eagle3={facts.config.kind == 'eagle3'})"
    code = _code("from eagle.model.ea_model import EaModel", "", f"model = {load}", language="python")
    return "The EAGLE repository", [*_code(command, language="bash"), "", *code]


def _original(title: str, module: str, name: str) -> Callable[[Facts, Place], tuple[str, list[str]]]:
    """Of the repositories of Medusa and Hydra, whose loaders take the head's directory."""

    def lines(facts: Facts, place: Place) -> tuple[str, list[str]]:
        command, folder = _fetch(facts, place)
        code = _code(
            f"from {module} import {name}", "", f'model = {name}.from_pretrained("{folder}")', language="python"
        )
        return title, [*_code(command, language="bash"), "", *code]

    return lines


_ENGINES: dict[str, Callable[[Facts, Place], tuple[str, list[str]]]] = {
    NATIVE: _native,
    "vllm": _vllm,
    "sglang": _sglang,
    "speculators": _speculators,
    "trtllm": _trtllm,
    "eagle": _eagle,
    "medusa": _original("The Medusa repository", "medusa.model.medusa_model", "MedusaModel"),
    "hydra": _original("The Hydra repository", "hydra.model.hydra_model", "HydraModel"),
}
