"""`speculate` and the hook of `model.generate` give what `generate` alone gives, with its own arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from torch import Tensor
from transformers import StoppingCriteria

from heads.base import TreePolicy
from heads.checkpoint import save_head
from infer.speculate import adapter_of, draft_generate, speculate
from tests.adapters import adapted
from tests.tiny import CONFIGS, prompt_ids, tiny_head, tiny_model, tiny_target, tiny_tokenizer

LENGTHS = (7, 3, 10)
TREE = TreePolicy(width=3, depth=3, total=9)
PAD = 511


def padded(side: str) -> tuple[Tensor, Tensor]:
    prompts = [prompt_ids(length, seed=length) for length in LENGTHS]
    ids, mask = [], []
    for prompt in prompts:
        pads, ones = [PAD] * (10 - len(prompt)), [1] * len(prompt)
        zeros = [0] * len(pads)
        ids.append(pads + prompt if side == "left" else prompt + pads)
        mask.append(zeros + ones if side == "left" else ones + zeros)
    return torch.tensor(ids), torch.tensor(mask)


def reference(model: Any, **kwargs: Any) -> Tensor:
    """transformers' own answer to the left-padded batch (it cannot do right-padded ones)."""
    ids, mask = padded("left")
    return model.generate(ids, attention_mask=mask, pad_token_id=PAD, **kwargs)[:, 10:]


@pytest.fixture(name="pair")
def make_pair() -> tuple[Any, Any]:
    return tiny_model("llama"), tiny_head(tiny_target("llama"))


class SeenBefore(StoppingCriteria):
    """Stops a row at its first token that it has emitted before: somewhere in the middle of blocks."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        last = input_ids[:, -1:]
        return (input_ids[:, 10:-1] == last).any(1)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.5},
    "no repeats": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [17, 3]]},
    "suppress": {"suppress_tokens": list(range(0, 500, 2))},
    "minimum": {"min_new_tokens": 12, "eos_token_id": list(range(40))},
    "eos list": {"eos_token_id": list(range(0, 512, 9))},
    "forced end": {"forced_eos_token_id": 7, "eos_token_id": 7},
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_settings(pair: tuple[Any, Any], side: str, setting: str) -> None:
    model, head = pair
    chosen = {"max_new_tokens": 20, "do_sample": False, **SETTINGS[setting]}
    want = reference(model, **chosen)
    ids, mask = padded(side)
    out = speculate(model, head, ids, mask, tree=TREE, pad_token_id=PAD, **chosen)
    assert torch.equal(out.sequences[:, :10], ids)
    assert torch.equal(out.sequences[:, 10:], want)
    for row, new_ids in enumerate(out.new_ids):
        assert want[row, : len(new_ids)].tolist() == new_ids and bool((want[row, len(new_ids) :] == PAD).all())
        assert out.stats[row].check().new_tokens == len(new_ids)


def test_a_criterion_in_the_middle_of_a_block(pair: tuple[Any, Any]) -> None:
    model, head = pair
    # transformers only pads rows that have ended if there is an end-of-sequence token at all
    chosen: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 509}
    chosen["stopping_criteria"] = [SeenBefore()]
    want = reference(model, **chosen)
    out = speculate(model, head, *padded("left"), tree=TREE, pad_token_id=PAD, **chosen)
    assert torch.equal(out.sequences[:, 10:], want)
    assert "criteria" in out.reasons


def test_generate_with_the_hook(pair: tuple[Any, Any], tmp_path: Path) -> None:
    model, head = pair
    save_head(head, tmp_path / "head")
    want = reference(model, max_new_tokens=16, do_sample=False)
    ids, mask = padded("left")
    common: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16, "pad_token_id": PAD, "do_sample": False}
    for given in (head, tmp_path / "head", str(tmp_path / "head")):
        out = model.generate(ids, custom_generate=draft_generate, draft_head=given, draft_tree=TREE, **common)
        assert torch.equal(out[:, 10:], want)
    out = model.generate(ids, custom_generate=draft_generate, draft_head=head, return_dict_in_generate=True, **common)
    assert torch.equal(out.sequences[:, 10:], want)


@pytest.mark.parametrize("proposal", ["top_k", "sampled"])
def test_sampling_follows_torchs_seed(pair: tuple[Any, Any], proposal: Any) -> None:
    model, head = pair
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        chosen: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 12}
        outs.append(speculate(model, head, *padded("left"), tree=TREE, proposal=proposal, **chosen).new_ids)
    assert outs[0] == outs[1] != outs[2]


def test_sampling_from_few_tokens_stays_among_them(pair: tuple[Any, Any]) -> None:
    """top_k of one leaves the argmax: every rule must give the greedy text."""
    model, head = pair
    want = reference(model, max_new_tokens=12, do_sample=False)
    for proposal, rule in (("top_k", None), ("top_k", "top_k"), ("sampled", None), ("sampled", "match")):
        out = speculate(
            model,
            head,
            *padded("left"),
            proposal=proposal,  # type: ignore[arg-type]
            rule=rule,
            do_sample=True,
            top_k=1,
            max_new_tokens=12,
            pad_token_id=PAD,
        )
        assert torch.equal(out.sequences[:, 10:], want)


def test_stop_strings() -> None:
    tokenizer = tiny_tokenizer()
    config = CONFIGS["llama"].to_dict() | {"vocab_size": len(tokenizer)}
    model = tiny_model(type(CONFIGS["llama"])(**config))
    head = tiny_head(adapter_of(model))
    ids = torch.tensor([tokenizer("Hello")["input_ids"]])
    free = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    for at in (1, 5, 10):
        stop = tokenizer.decode(free[at : at + 2])
        if "\N{REPLACEMENT CHARACTER}" in stop or not stop:
            continue
        kwargs: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        want = model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **kwargs)[0, ids.shape[1] :].tolist()
        out = speculate(model, head, ids, tree=TREE, stop_strings=[stop], tokenizer=tokenizer, **kwargs)
        assert out.new_ids == [want] and out.reasons == ["string"]


def test_blocks_are_handed_on(pair: tuple[Any, Any]) -> None:
    model, head = pair
    got: list[list[int]] = [[], [], []]
    accepted = [0, 0, 0]

    def on_block(row: int, ids: list[int], drafted: int) -> None:
        got[row] += ids
        accepted[row] += drafted

    chosen: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    out = speculate(model, head, *padded("left"), on_block=on_block, **chosen)
    assert got == out.new_ids
    assert accepted == [sum(stats.accepted_per_round) for stats in out.stats]


def test_refusals(pair: tuple[Any, Any]) -> None:
    model, head = pair
    ids, mask = padded("left")
    with pytest.raises(ValueError, match="draft_head is None"):
        model.generate(ids, custom_generate=draft_generate, max_new_tokens=4)
    with pytest.raises(ValueError, match="num_beams is 2"):
        model.generate(ids, custom_generate=draft_generate, draft_head=head, num_beams=2, max_new_tokens=4)
    with pytest.raises(ValueError, match="do_sample"):
        speculate(model, head, ids, mask, rule="match", max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="1 seeds for 3 rows"):
        speculate(model, head, ids, mask, seeds=[1], max_new_tokens=4, do_sample=True)
    holes = mask.clone()
    holes[2, 4] = 0
    with pytest.raises(ValueError, match="row 2 has holes"):
        speculate(model, head, ids, holes, max_new_tokens=4, do_sample=False)


# ---- live adapters of peft ---------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "lm_head", "embed_tokens"]])
def test_a_live_adapter_is_decoded_as_it_is(modules: Any) -> None:
    """Unmerged, through `speculate` and through peft's own `generate`; switched off, and exchanged for another."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=modules)
    model: Any = adapted(tiny_model("llama_tied"), config)
    want, (ids, mask) = peft_reference(model), padded("left")
    head = tiny_head(adapter_of(model))
    common = {"attention_mask": mask, "pad_token_id": PAD, **GREEDY}
    out = speculate(model, head, ids, tree=TREE, **common)
    assert torch.equal(out.sequences[:, 10:], want) and len(set(out.new_ids[0])) > 5
    out = model.generate(input_ids=ids, custom_generate=draft_generate, draft_head=head, draft_tree=TREE, **common)
    assert torch.equal(out[:, 10:], want)
    assert adapter_of(model) is adapter_of(model.get_base_model())
    one = speculate(model, head, ids[2:], tree=TREE, pad_token_id=PAD, **GREEDY)
    assert torch.equal(one.sequences[:, 10:], want[2:])
    base = reference(tiny_model("llama_tied"), **GREEDY)
    with model.disable_adapter():
        assert torch.equal(speculate(model, head, ids, tree=TREE, **common).sequences[:, 10:], base)
    assert torch.equal(speculate(model, head, ids, tree=TREE, **common).sequences[:, 10:], want)
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"]))
    model.set_adapter("other")  # its B is 0
    assert torch.equal(speculate(model, head, ids, tree=TREE, **common).sequences[:, 10:], base)
    assert not torch.equal(base, want)


def peft_reference(model: Any) -> Tensor:
    ids, mask = padded("left")
    found: Tensor = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=PAD, **GREEDY)
    return found[:, 10:]


def test_an_adapter_that_comes_later_is_followed(pair: tuple[Any, Any]) -> None:
    """The adapter of ours is kept with the model, which peft then changes in place, its LM head too."""
    model, head = pair
    ids, mask = padded("left")
    common = {"attention_mask": mask, "pad_token_id": PAD, "tree": TREE, **GREEDY}
    plain = speculate(model, head, ids, **common).sequences[:, 10:]
    wrapped: Any = adapted(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"]))
    want = peft_reference(wrapped)
    for whole in (wrapped, model):
        assert torch.equal(speculate(whole, head, ids, **common).sequences[:, 10:], want)
    assert adapter_of(model).lm_head is model.lm_head and not torch.equal(plain, want)
    merged = wrapped.merge_and_unload()
    assert torch.equal(speculate(merged, head, ids, **common).sequences[:, 10:], want)
    assert adapter_of(merged).lm_head is merged.lm_head


def test_a_draft_vocabulary_follows_an_adapted_lm_head() -> None:
    """Its rows cannot be copied from the base's weight: drafts would be another model's."""
    target = adapter_of(adapted(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"])))
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    few = torch.tensor([3, 99, 500])
    torch.testing.assert_close(target.logits_of_tokens(few)(hidden), target.logits(hidden)[:, few])
    assert target.vocab_size == 512 and target.hidden_size == 64 and target.lm_head_rows() is None


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3, 4]),
    ],
    ids=["prompt", "prefix", "alora"],
)
def test_adapters_beside_the_layers_are_refused(pair: tuple[Any, Any], config: Any) -> None:
    model: Any = adapted(tiny_model("llama"), config)
    ids, mask = padded("left")
    common = {"attention_mask": mask, "pad_token_id": PAD, **GREEDY}
    with pytest.raises(ValueError, match="is not in the layers alone"):
        speculate(model, pair[1], ids, **common)
    with pytest.raises(ValueError, match="is not in the layers alone"):
        model.generate(input_ids=ids, custom_generate=draft_generate, draft_head=pair[1], **common)


def test_a_wrapper_that_does_more_is_refused(pair: tuple[Any, Any]) -> None:
    model: Any = adapted(tiny_model("llama"))
    whole = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = whole(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    model.forward = forward
    with pytest.raises(ValueError, match=r"\(PeftModelForCausalLM\) is not in the layers alone"):
        adapter_of(model)


def test_one_adapter_for_all_rows(pair: tuple[Any, Any]) -> None:
    model: Any = adapted(tiny_model("llama"))
    with pytest.raises(ValueError, match="adapter_names is given"):
        speculate(model, pair[1], *padded("left"), adapter_names=["default"] * 3, **GREEDY)
