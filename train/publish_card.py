"""The model card of a published head: README.md with its metadata, made from facts on disk alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from heads.config import HeadConfig
from heads.formats.opening import NATIVE
from heads.kinds import kind_of
from infer.report import BASELINES
from train.publish_facts import Facts, Report, is_hub_id
from train.publish_serve import Place, serve_lines
from train.scrub import local_paths, scrub, scrub_command

MARK = "library_name: draftsmith"  # a line of every card of ours
NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "medusa": "Medusa", "hydra": "Hydra"}
_EXACT = "Drafts are only proposals: the target scores each of them, and what it would not have said is dropped."


@dataclass(frozen=True)
class Listed:
    """A file of the repository, for the card. size: bytes."""

    name: str
    size: int


def card_text(facts: Facts, places: Sequence[Place], files: Sequence[Listed]) -> str:
    """The whole README.md.

    Args:
        places: the layouts in the repository, the one at its root first.
        files: the other files of the repository.

    Raises:
        ValueError: the metadata is not what the hub takes, or a path of this machine would be in the card.
    """
    parts = [
        [f"# {facts.name}", "", *_summary(facts)],
        ["## What is exact", "", *_exactness(facts)],
        ["## Use", "", *serve_lines(facts, places)],
        ["## Measured", "", *_measured(facts)],
        ["## Training", "", *_training(facts)],
        ["## Files", "", *_table([["file", "bytes"], *([f"`{f.name}`", f"{f.size:,}"] for f in files)])],
        ["## Licence", "", *_licence(facts)],
    ]
    body = "\n\n".join("\n".join(lines) for lines in parts)
    text = f"---\n{metadata_yaml(metadata(facts, places))}---\n\n{body}\n"
    found = local_paths(text)
    if found:
        raise ValueError(f"the card would hold paths of this machine: {', '.join(found[:3])}; please report this")
    return text


# ---- metadata ----------------------------------------------------------------------------------------------


def metadata(facts: Facts, places: Sequence[Place]) -> dict[str, Any]:
    """Of the card's header, as the hub's library orders it."""
    adapted = ["lora"] if facts.adapter is not None else []
    engines = [place.layout for place in places if place.layout != NATIVE]
    data = ModelCardData(
        base_model=facts.base_model,
        base_model_relation="adapter",  # the nearest that the hub has; without it, it takes a head for a fine-tune
        library_name="draftsmith",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", facts.config.kind, *adapted, *engines],
        datasets=sorted({name for name in _data_names(facts) if is_hub_id(name)}) or None,
        **facts.licence.metadata(),
    )
    return dict(data.to_dict())


def metadata_yaml(data: Mapping[str, Any]) -> str:
    """As YAML that reads back as the same.

    Raises:
        ValueError: a field is missing or is not what the hub takes.
    """
    for name in ("base_model", "license", "library_name", "pipeline_tag", "tags"):
        if not data.get(name):
            raise ValueError(f"the card's metadata has no {name}")
    for name in ("base_model", "datasets"):
        value = data.get(name) or []
        for one in [value] if isinstance(value, str) else value:
            if not is_hub_id(one):
                raise ValueError(f"the card's metadata: {name} is {one!r}, expected an id of the hub")
    if data["license"] == "other" and not data.get("license_name"):
        raise ValueError("the card's metadata: license is other, which needs license_name")
    for value in [*data["tags"], data["license"], data["pipeline_tag"]]:
        if not isinstance(value, str) or not value.strip() or "\n" in value:
            raise ValueError(f"the card's metadata holds {value!r}, expected a word")
    text = ModelCardData(**data).to_yaml() + "\n"
    if yaml.safe_load(text) != data or MARK not in text.splitlines():
        raise ValueError(f"the card's metadata does not read back as it is: {text!r}")
    return text


# ---- what it is --------------------------------------------------------------------------------------------


def _link(facts: Facts) -> str:
    return f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"


def _summary(facts: Facts) -> list[str]:
    config = facts.config
    size = f"{facts.parameters / 1e6:.1f} M parameters, {facts.dtype}"
    lines = [
        f"{NAMES[config.kind]} draft head for speculative decoding of {_link(facts)} ({size}). It drafts tokens that "
        "the target verifies; alone it is of no use."
    ]
    if config.trained_with_target:
        lines += [
            "",
            "**Target and head were trained together (Medusa-2).** The head belongs to the target *with the LoRA "
            "adapter in this repository*, and must be used with it.",
        ]
    elif facts.adapter is not None:
        lines += [
            "",
            "**The head was trained for the target with a peft adapter, which is in this repository.** On the bare "
            "base model it may accept fewer drafts.",
        ]
    return lines


def _exactness(facts: Facts) -> list[str]:
    if facts.config.trained_with_target:
        return [
            "Output is exact towards the adapted target, and **not lossless towards the original model**: training "
            f"moved the target. {_drift(facts)} {_EXACT}",
        ]
    towards = "adapted target" if facts.adapter is not None else "target"
    return [
        f"Greedy output is the {towards}'s own, sampled output has its law, whatever the head drafts. {_EXACT} In half "
        "precision a pass over several tokens rounds differently from a pass over one, so near-ties can fall the other "
        "way, as between any two batch sizes. Typical acceptance and other relaxed rules, where an engine has them, "
        "are not lossless."
    ]


def _drift(facts: Facts) -> str:
    drift = facts.provenance.get("target_drift")
    if not drift:
        return "How far is not recorded."
    return (
        f"On held-out rows: KL {drift['kl']:.4f} nats per token, perplexity {drift['base_perplexity']:.3f} before and "
        f"{drift['perplexity']:.3f} after, another argmax at {drift['argmax_changed']:.1%} of the positions."
    )


# ---- figures -----------------------------------------------------------------------------------------------


def _measured(facts: Facts) -> list[str]:
    lines = [] if facts.reports else ["No evaluation of this head was at hand, so no speed is claimed.", ""]
    for report in facts.reports:
        lines += [*_report_lines(report), ""]
    found = facts.provenance.get("evaluation") or {}
    if found.get("accept_length"):
        accuracy = ", ".join(f"{100 * a:.0f}" for a in found["accuracy"])
        lines += [
            f"Simulated in training on held-out rows, a chain of {len(found['accuracy'])} drafts: accept length "
            f"{found['accept_length']:.2f} tokens per pass of the target; the draft is the target's own argmax at "
            f"{accuracy} % of the positions, by depth."
        ]
    return lines[:-1] if lines and not lines[-1] else lines


def _report_lines(report: Report) -> list[str]:
    overall, meta = report.data["overall"], report.data["meta"]
    lines = [
        f"**{scrub(str(meta.get('prompts', report.name)))}**, {overall['prompts']} prompts, up to "
        f"{meta.get('max_new_tokens')} new tokens each, {_batch(meta)}, {_sampling(meta)}, {meta.get('dtype')}, on "
        f"{meta.get('hardware')} (CPU threads: {meta.get('threads')}):",
        "",
    ]
    rows = [["", "tokens/s", "passes of the target", "speed-up of the head over it"]]
    for side in [name for name in BASELINES if f"new_tokens_{name}" in overall]:
        rows.append(
            [
                {"library": "transformers' `generate`", "plain": "plain decoding"}.get(side, "plain, compiled"),
                _number(overall[f"tokens_per_second_{side}"], "{:.1f}"),
                f"{overall[f'target_passes_{side}']:,}",
                _number(overall.get(f"speedup_{side}"), "{:.2f}x"),
            ]
        )
    speed, passes = _number(overall["tokens_per_second_spec"], "{:.1f}"), f"{overall['target_passes_spec']:,}"
    lines += [*_table([*rows, ["with this head", speed, passes, ""]]), "", *_tau_lines(report)]
    if overall.get("lossy"):
        lines += ["", f"Lossy: {scrub(str(overall['lossy']))}."]
    versions = ", ".join(f"{name} {meta[name]}" for name in ("python", "torch", "transformers") if name in meta)
    lines += ["", f"{versions}{_commit(meta)}, made by", "", "```", scrub_command(meta["command"]), "```"]
    return lines


def _tau_lines(report: Report) -> list[str]:
    overall, acceptance = report.data["overall"], report.data["acceptance"]
    tau = f"**{_number(overall['tau'], '{:.2f}')}**"
    if overall.get("tau_low") is not None:
        tau += f" (95 % interval over prompts: {overall['tau_low']:.2f} .. {overall['tau_high']:.2f})"
    text = f"Accept length, tokens per pass of the target, its own included: {tau}."
    if overall.get("identical_share") is not None:
        text += f" Texts equal to plain decoding's, token for token: {overall['identical_share']:.0%} of the prompts."
    rates = acceptance["conditional_per_depth"]
    if not rates:
        return [text]
    head = ["depth", *(str(depth) for depth in range(1, len(rates) + 1))]
    given = ["accepted, if the one before was", *(_number(rate, "{:.1%}") for rate in rates)]
    of_all = ["accepted, of all rounds", *(f"{share:.1%}" for share in acceptance["unconditional_per_position"])]
    return [text, "", *_table([head, given, of_all])]


def _batch(meta: Mapping[str, Any]) -> str:
    tree = meta.get("tree") or {}
    size = f"a tree of {tree['total']} tokens" if tree.get("total") else "a tree"
    rows = meta.get("batch", 1)
    return (
        f"{rows} {'prompt' if rows == 1 else 'prompts'} at a time, {size}{', compiled' if meta.get('compiled') else ''}"
    )


def _sampling(meta: Mapping[str, Any]) -> str:
    found = meta.get("sampling", "greedy")
    return "greedy" if found == "greedy" else f"sampled ({_settings(found)}, rule {meta.get('rule')})"


# ---- training ----------------------------------------------------------------------------------------------


def _training(facts: Facts) -> list[str]:
    if not facts.provenance:
        return ["How the head was trained is not recorded."]
    made = facts.provenance
    entry = kind_of(facts.config.kind).entry
    command = scrub_command(str(made.get("command", "")))
    command = f"{entry} {command.partition(' ')[2]}" if command.startswith(entry.rpartition("/")[2]) else command
    packages = ", ".join(f"{name} {version}" for name, version in (made.get("packages") or {}).items() if version)
    machine = made.get("machine") or {}
    where = machine.get("cuda") or f"a CPU ({machine.get('processor')}, threads: {machine.get('threads')})"
    return [
        *_table([["", ""], *_recipe(facts)]),
        "",
        "Data:",
        "",
        *_data_lines(facts),
        "",
        f"Python {made.get('python')}, {packages}; on {where}{_commit(made)}. Everything that was set is "
        "in `run.yaml`, with paths cut to their last part. The command:",
        "",
        "```",
        f"accelerate launch {command}" if command.startswith("train/") else command,
        "```",
    ]


def _recipe(facts: Facts) -> list[list[str]]:
    config, run, made = facts.config, facts.run, facts.provenance
    loss = {key: value for key, value in (run.get("loss") or {}).items() if value is not None}
    optim, train = run.get("optim") or {}, run.get("train") or {}
    vocabulary = f"{config.draft_vocab_size:,} of {config.vocab_size:,}" if config.draft_vocab_size else "all"
    seen, seconds = _number(made.get("supervised_tokens_seen"), "{:,}"), _number(made.get("seconds"), "{:.0f} s")
    known = {
        "head": f"{NAMES[config.kind]}{_shape(config)}",
        "drafted vocabulary": f"{vocabulary} tokens",
        "trained": f"{made.get('step')} steps, {_number(made.get('epochs'), '{:.2f}')} epochs, "
        f"{seen} supervised tokens, {seconds}",
        "loss": _settings(loss),
        "optimizer": _settings({"AdamW, lr": optim.get("lr"), "weight decay": optim.get("weight_decay")}),
        "tokens per batch": str(train.get("tokens_per_batch", "")),
        "seed": str(train.get("seed", "")),
        "longest row": _number(config.trained_length or (run.get("data") or {}).get("max_length"), "{:,} tokens"),
        "target's sha256": _settings(
            {
                "embedding": _short(config.embedding_sha256),
                "LM head": _short(config.lm_head_sha256),
                "tokenizer": _short(config.tokenizer_sha256),
            }
        ),
        "target's dtype": str(made.get("target_dtype", "")).removeprefix("torch."),
    }
    joint = run.get("joint") or {}
    if config.trained_with_target:
        known["LoRA in the target"] = _settings({key: joint.get(key) for key in ("rank", "alpha", "lr", "modules")})
    return [[name, value] for name, value in known.items() if value and value != "-"]


def _shape(config: HeadConfig) -> str:
    if config.num_draft_heads:
        return f", {config.num_draft_heads} heads of {config.num_blocks} blocks"
    taps = f", reads the outputs of layers {', '.join(map(str, config.taps))} (0-based)" if config.taps else ""
    return f", one decoder layer of width {config.hidden_size}{taps}"


def _records(facts: Facts) -> list[dict[str, Any]]:
    """Of the data stages."""
    data = facts.provenance.get("data") or {}
    return [data] if "key" in data else data.get("sources", [])


def _sources(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    key = record["key"]
    single = {"path": key.get("data.path"), "sha256": key.get("data.sha256")}
    return list(key.get("data.sources") or ([single] if single["path"] else []))


def _data_names(facts: Facts) -> list[str]:
    return [source["path"] for record in _records(facts) for source in _sources(record)]


def _data_lines(facts: Facts) -> list[str]:
    lines = []
    for record in _records(facts):
        key, sources = record["key"], _sources(record)
        texts = ", ".join(map(_source_text, sources)) if sources else "prompts that the target invented itself"
        kept = sources and key.get("data.answers") != "regenerate"
        answers = "answers as they were in the data" if kept else "answered by the target"
        lines.append(
            f"- {texts}; {answers}: {record.get('train_rows', 0):,} conversations, "
            f"{record.get('supervised_tokens', 0):,} supervised tokens, {record.get('held_out_rows', 0):,} held out"
        )
    return lines or ["- not recorded"]


def _source_text(source: Mapping[str, Any]) -> str:
    name = source["path"]
    if is_hub_id(name):
        return f"[{name}](https://huggingface.co/datasets/{name})"
    digest = _short(source.get("sha256"))
    return f"`{scrub(name)}`" + (f" (sha256 {digest})" if digest else "")


def _licence(facts: Facts) -> list[str]:
    licence = facts.licence
    title = f"[{licence.title}]({licence.link})" if licence.link else licence.title
    return [f"{title}, {licence.source}. The head was trained on outputs of {_link(facts)}: that model's terms apply."]


# ---- words -------------------------------------------------------------------------------------------------


def _commit(made: Mapping[str, Any]) -> str:
    return f"; Draftsmith {made['commit']}" if made.get("commit") else ""


def _short(digest: Any) -> str | None:
    return f"{digest[:12]}.." if isinstance(digest, str) else None


def _settings(values: Mapping[str, Any]) -> str:
    shown = {name.replace("_", " "): value for name, value in values.items() if value is not None}
    return ", ".join(f"{name} {v if isinstance(v, str) else json.dumps(v)}" for name, v in shown.items())


def _number(value: Any, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
