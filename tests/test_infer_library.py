"""The library's own `generate`: as a baseline, and as plain decoding for targets that cannot verify trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MambaConfig

from heads.target import TargetAdapter
from infer.engine import RowRequest
from infer.library import decode_library, library_attention
from infer.library import library_greedy as library_counts
from infer.probe import require_tree
from infer.sampling import build_processors
from infer.stopping import StopRule
from tests.tiny import CONFIGS, library_greedy, prompt_ids, tiny_model, tiny_target, tiny_tokenizer

NEW = 12
PROMPTS = [prompt_ids(length, seed) for seed, length in enumerate((9, 4, 6))]
LIMIT = StopRule(frozenset(), NEW)


# ---- a baseline (its texts: tests/test_infer_evaluation.py) -------------------------------------------------


def test_the_librarys_counts_alone() -> None:
    stats = library_counts(tiny_target("llama"), PROMPTS, 5)
    lengths = [(one.prompt_tokens, one.new_tokens, one.target_passes) for one in stats]
    assert lengths == [(len(ids), 5, 4) for ids in PROMPTS]
    assert len({one.total_seconds for one in stats}) == 1 and stats[0].seconds["prefill"] > 0


def test_a_config_without_groups_keeps_its_attention() -> None:
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_key_value_heads": 4})
    target = tiny_target(config)
    assert library_attention(target) == target.config._attn_implementation == "sdpa"


# ---- unfit targets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_is_the_librarys(name: str) -> None:
    """Whatever the model's own generation settings are, each row gets its tokens, one a block."""
    expected = [library_greedy(tiny_model(name), ids, NEW) for ids in PROMPTS]
    target = tiny_target(name)
    config, attention = target.model.generation_config, target.config._attn_implementation
    config.update(repetition_penalty=1.5, max_length=3, eos_token_id=expected[0][2], num_beams=2)
    blocks: list[tuple[list[int], int]] = []
    rows = [RowRequest(ids, LIMIT, on_block=lambda *block: blocks.append(block)) for ids in PROMPTS]
    results = decode_library(target, rows, do_sample=False)
    assert [result.ids for result in results] == expected
    assert blocks == [([token], 0) for ids in expected for token in ids]  # a row after the other
    for result, ids in zip(results, PROMPTS, strict=True):
        stats = result.stats.check()
        assert (stats.prompt_tokens, stats.new_tokens, stats.target_passes) == (len(ids), NEW, NEW - 1)
        assert result.reason == "length" and stats.seconds["prefill"] > 0 and stats.seconds["rest"] > 0
    assert target.model.generation_config is config and target.config._attn_implementation == attention


def test_it_ends_by_the_rule() -> None:
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "vocab_size": len(tokenizer)})
    ids = [token % len(tokenizer) for token in PROMPTS[0]]
    text = library_greedy(tiny_model(config), ids, 40)
    shown = [tokenizer.decode([token]) for token in text]
    last = next(i for i in range(2, 40) if shown[i].isalnum() and shown[i].isascii() and text[i] not in text[:i])
    target = tiny_target(config)
    for rule, wanted, reason in (
        (StopRule(frozenset({text[last]}), 40), text[: last + 1], "eos"),
        (StopRule(frozenset(), 40, (shown[last],), tokenizer), text[: last + 1], "string"),
        (StopRule(frozenset(), last), text[:last], "length"),
        (StopRule(frozenset(), 1), text[:1], "length"),
    ):
        result = decode_library(target, [RowRequest(ids, rule)], do_sample=False)[0]
        assert (result.ids, result.reason) == (wanted, reason)
        assert result.stats.check().new_tokens == len(wanted)


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    target = tiny_target("llama")

    def draw(*seeds: int, **settings: Any) -> list[list[int]]:
        processors = build_processors(do_sample=True, **settings)
        rows = [RowRequest(PROMPTS[0], LIMIT, processors, seed=seed) for seed in seeds]
        return [result.ids for result in decode_library(target, rows, do_sample=True)]

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two = draw(1, 2)
    assert torch.equal(torch.random.get_rng_state(), before)  # its draws leave no trace
    torch.manual_seed(6)
    assert draw(2, 1, 1) == [two, one, one] and one != two
    greedy = library_greedy(tiny_model("llama"), PROMPTS[0], NEW)
    assert draw(1, top_k=1) == [greedy] and one != greedy


def test_a_failing_reader_leaves_the_model_as_it_was() -> None:
    target = tiny_target("llama")
    config, attention = target.model.generation_config, target.config._attn_implementation

    def fail(emitted: list[int], accepted: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        decode_library(target, [RowRequest(PROMPTS[0], LIMIT, on_block=fail)], do_sample=False)
    assert target.model.generation_config is config and target.config._attn_implementation == attention


def test_a_recurrent_model_is_decoded() -> None:
    common: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = MambaConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.35, **common
    )
    expected = [library_greedy(tiny_model(config), ids, NEW) for ids in PROMPTS]
    target = TargetAdapter(tiny_model(config), name="mamba")
    with pytest.raises(ValueError, match="recurrent state"):
        require_tree(target)
    results = decode_library(target, [RowRequest(ids, LIMIT) for ids in PROMPTS], do_sample=False)
    assert [result.ids for result in results] == expected and len(set(expected[0])) > 1
