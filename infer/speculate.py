"""Use from Python: `speculate(model, head, input_ids, ...)`, and the hook for `model.generate`.

Everything that `generate` understands (temperature, top_p, penalties, bad words, stopping criteria, a generation
config ...) means the same here, because `generate` itself prepares it and hands it to `draft_generate`:

    model.generate(input_ids, custom_generate=draft_generate, draft_head=head, max_new_tokens=100)

`generate` drops its own `streamer` and `tokenizer` for such callables, so those have names of their own.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from heads.adapter import check_wrapper, unwrapped
from heads.base import DraftHead, TreePolicy
from heads.formats.opening import known_target, open_head
from heads.target import TargetAdapter
from heads.tree import Proposal
from infer.engine import DecodeOptions, RowRequest, RowResult, decode
from infer.metrics import DecodeStats
from infer.probe import require_tree
from infer.stopping import StopReason, StopRule
from infer.trees import TreeChoice, policy_of


@dataclass
class SpeculateOutput:
    """sequences [B, T]: prompts as given, then the new ids, padded on the right. Per row: counts, and why it ended."""

    sequences: Tensor
    new_ids: list[list[int]]
    stats: list[DecodeStats]
    reasons: list[StopReason]


@dataclass
class _Call:
    """What `draft_generate` needs beside `generate`'s own arguments, and the place where it leaves its results."""

    policy: TreePolicy
    proposal: Proposal = "top_k"
    rule: str | None = None
    seeds: Sequence[int] | None = None
    on_block: Callable[[int, list[int], int], None] | None = None
    stop_strings: Sequence[str] = ()
    tokenizer: Any = None
    results: list[RowResult] = field(default_factory=list)


def adapter_of(model: Any, taps: Sequence[int] = ()) -> TargetAdapter:
    """The model's adapter, made and probed once per model and kept with it.

    A PeftModel is decoded with whatever adapter is active in it; nothing is merged.

    Raises:
        ValueError: the model cannot verify drafted trees, with the reason.
    """
    inner = unwrapped(model)  # what `PeftModel.generate` hands to `draft_generate`, too
    if inner is not model and not model.__dict__.get("_draftsmith_checked"):
        check_wrapper(model, inner)
        model.__dict__["_draftsmith_checked"] = True
    adapter: TargetAdapter | None = inner.__dict__.get("_draftsmith_adapter")
    # The second: peft has put something around the LM head since then.
    if adapter is None or adapter.lm_head is not inner.get_output_embeddings():
        adapter = TargetAdapter(inner, taps, name=getattr(inner.config, "_name_or_path", "") or type(inner).__name__)
        require_tree(adapter)
        inner.__dict__["_draftsmith_adapter"] = adapter
    adapter.tap(taps)
    return adapter


def speculate(
    model: Any,
    head: DraftHead | str | os.PathLike[str],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tree: TreeChoice = None,
    proposal: Proposal = "top_k",
    rule: str | None = None,
    seeds: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    tokenizer: Any = None,
    on_block: Callable[[int, list[int], int], None] | None = None,
    **generate_kwargs: Any,
) -> SpeculateOutput:
    """Decodes input_ids [B, L] (padded on the left or the right, with `attention_mask`) with a draft head.

    Args:
        model: any causal LM of transformers.
        head: a head, or the directory or hub id of one, in any layout.
        tree: shape of the drafted trees, a `StaticTree`, or a file of `scripts/fit_tree.py`; None: tree.json in the
            head's directory, else the default shape.
        proposal, rule: see `infer.engine.DecodeOptions`. rule None: "greedy", or with do_sample "match" for likeliest
            children and "sampled" for drawn ones. All but "typical_lossy" give exactly the target's law.
        seeds: one per row; None: drawn from torch's global generator, so that torch.manual_seed decides.
        stop_strings: with `tokenizer`. The ids include the token that completes one.
        on_block: called with (row, ids, how many of them are accepted drafts) as they are decided.
        generate_kwargs: as for `model.generate`.

    Raises:
        ValueError: anything that does not fit, before decoding starts.
    """
    if generate_kwargs.get("adapter_names") is not None:
        raise ValueError("adapter_names is given: an adapter per row is not possible; set one with set_adapter")
    loaded = _loaded(model, head)
    call = _Call(
        policy=policy_of(tree, loaded, _folder(head), proposal),
        proposal=proposal,
        rule=rule,
        seeds=seeds,
        on_block=on_block,
        stop_strings=tuple(stop_strings),
        tokenizer=tokenizer,
    )
    sequences = model.generate(
        input_ids,
        attention_mask=attention_mask,
        custom_generate=draft_generate,
        draft_head=loaded,
        draft_call=call,
        **generate_kwargs,
    )
    sequences = sequences if isinstance(sequences, Tensor) else sequences.sequences
    rows = call.results
    return SpeculateOutput(sequences, [r.ids for r in rows], [r.stats for r in rows], [r.reason for r in rows])


def _loaded(model: Any, head: DraftHead | str | os.PathLike[str]) -> DraftHead:
    if isinstance(head, DraftHead):
        adapter = adapter_of(model, head.needs.taps)
        return head.to(device=adapter.head_device, dtype=adapter.dtype).eval()
    config = unwrapped(model).config
    opened = open_head(os.fspath(head), known_target(config, getattr(config, "_name_or_path", "")))
    return opened.for_target(adapter_of(model))


def _folder(head: DraftHead | str | os.PathLike[str]) -> str | os.PathLike[str] | None:
    return None if isinstance(head, DraftHead) else head


def draft_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_head: DraftHead | str | os.PathLike[str] | None = None,
    draft_tree: TreeChoice = None,
    draft_seeds: Sequence[int] | None = None,
    draft_call: _Call | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """For `model.generate(custom_generate=draft_generate, draft_head=..., ...)`; see `speculate`.

    Args:
        draft_head: a head, or the directory of one. draft_tree, draft_seeds: as `tree` and `seeds` of `speculate`.

    Returns:
        What `generate` returns: the sequences, or with return_dict_in_generate an output that holds them.

    Raises:
        ValueError: no head; beams, several returned sequences or guidance (not a decoding of one row per prompt).
    """
    # A PeftModel that adds to the prompt calls with its inner model, which prepares inputs by a method of the wrapper.
    unwrapped(getattr(model.prepare_inputs_for_generation, "__self__", model))
    if draft_head is None:
        raise ValueError("draft_head is None, expected a head or the directory of one; pass draft_head=")
    if generation_config.num_beams not in (None, 1):
        raise ValueError(f"num_beams is {generation_config.num_beams}, expected 1: drafts verify single sequences")
    head = _loaded(model, draft_head)
    call = draft_call or _Call(policy_of(draft_tree, head, _folder(draft_head), "top_k"), seeds=draft_seeds)
    target = adapter_of(model, head.needs.taps)
    options = _options(call, bool(generation_config.do_sample))
    prompts, prefixes = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    stop = StopRule(
        eos_ids=_eos_ids(generation_config),
        max_new_tokens=generation_config.max_length - input_ids.shape[1],
        stop_strings=tuple(call.stop_strings),
        tokenizer=call.tokenizer,
        criteria=tuple(stopping_criteria),
    )
    processors = _per_row(logits_processor, len(prompts))
    requests = [
        RowRequest(
            prompt_ids=prompt,
            stop=stop,
            processors=processors[row],
            prefix_ids=prefix,
            seed=seed,
            on_block=None if call.on_block is None else functools.partial(call.on_block, row),
        )
        for row, (prompt, prefix, seed) in enumerate(zip(prompts, prefixes, _seeds(call, len(prompts)), strict=True))
    ]
    call.results = decode(target, head, requests, options)
    sequences = _padded(input_ids, [result.ids for result in call.results], generation_config)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]  # a LongTensor by value
    return sequences


def _options(call: _Call, do_sample: bool) -> DecodeOptions:
    rule = call.rule
    if rule is None:
        rule = ("sampled" if call.proposal == "sampled" else "match") if do_sample else "greedy"
    if (rule == "greedy") == do_sample:
        raise ValueError(f"rule is {rule!r} and do_sample {do_sample}: 'greedy' is the rule without sampling, alone")
    return DecodeOptions(call.policy, rule, call.proposal)


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts without padding, and what processors and criteria see: padded on the left, as `generate` expects it.

    Raises:
        ValueError: a mask with holes.
    """
    rows = input_ids.tolist()
    if attention_mask is None:
        return rows, rows
    prompts, prefixes = [], []
    for index, (ids, seen) in enumerate(zip(rows, attention_mask.tolist(), strict=True)):
        real = [position for position, flag in enumerate(seen) if flag]
        if not real or real[-1] - real[0] + 1 != len(real):
            raise ValueError(f"attention_mask of row {index} has holes or is empty, expected padding on one side only")
        prompt = ids[real[0] : real[-1] + 1]
        prompts.append(prompt)
        prefixes.append([*ids[: real[0]], *ids[real[-1] + 1 :], *prompt])
    return prompts, prefixes


def _per_row(processors: LogitsProcessorList, rows: int) -> list[LogitsProcessorList | None]:
    """The processors of each row; the same list for all where none of them holds something per row."""
    if not processors:
        return [None] * rows
    lengths = [getattr(one, "prompt_ignore_length", None) for one in processors]
    if not any(isinstance(length, Tensor) for length in lengths):
        return [processors] * rows
    lists: list[LogitsProcessorList | None] = []
    for row in range(rows):
        mine = LogitsProcessorList()
        for one, length in zip(processors, lengths, strict=True):
            if isinstance(length, Tensor):
                one = copy.copy(one)
                one.prompt_ignore_length = int(length[row])
            mine.append(one)
        lists.append(mine)
    return lists


def _eos_ids(config: GenerationConfig) -> frozenset[int]:
    eos = config.eos_token_id
    return frozenset() if eos is None else frozenset(eos if isinstance(eos, (list, tuple)) else [eos])


def _seeds(call: _Call, rows: int) -> list[int]:
    if call.seeds is None:
        return torch.randint(2**62, (rows,)).tolist()
    if len(call.seeds) != rows:
        raise ValueError(f"{len(call.seeds)} seeds for {rows} rows; give one per row")
    return list(call.seeds)


def _padded(input_ids: Tensor, new_ids: Sequence[Sequence[int]], config: GenerationConfig) -> Tensor:
    """Prompts as given, then the new ids, shorter rows filled up with the padding token."""
    pad = config.pad_token_id
    if pad is None:
        pad = min(_eos_ids(config), default=0)
    longest = max(len(ids) for ids in new_ids)
    tail = [[*ids, *[pad] * (longest - len(ids))] for ids in new_ids]
    return torch.cat([input_ids, torch.tensor(tail, device=input_ids.device, dtype=input_ids.dtype)], 1)
