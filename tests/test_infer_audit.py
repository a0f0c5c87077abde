"""The audit passes a right decoder and fails broken ones."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import ChildSampler, DraftHead, HeadBatch, HeadOutput, LossSpec, Needs, TreePolicy
from heads.cache import SlotCache
from heads.config import HeadConfig
from heads.growing import grow
from heads.target import TargetAdapter
from heads.tree import DraftTree
from infer import audit as module
from infer.audit import audit, enumerate_law, format_audit, g_test
from infer.engine import DecodeOptions, RowRequest, decode
from infer.sampling import Processing
from infer.stopping import StopRule
from tests.tiny import VOCAB, library_greedy, prompt_ids, tiny_model

POLICY = TreePolicy(3, 3, 8)
PROMPTS = [prompt_ids(length, seed) for seed, length in enumerate((20, 5, 11))]


def pair_model() -> Any:
    """A model whose next token depends on the last one above all, and only a little on those before; a flat law."""
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        if "o_proj" in name:
            parameter.data *= 0.01
        if "lm_head" in name:
            parameter.data *= 0.3
    return model


class PairHead(DraftHead):
    """Drafts from a table of the target's logits after each token alone, blurred by noise: right now and then."""

    needs = Needs()

    def __init__(self, target: TargetAdapter) -> None:
        super().__init__(HeadConfig.derive("eagle", target.config, target.vocab_size, target.name))
        noise_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            self.table_VV = target.model(torch.arange(VOCAB)[:, None]).logits[:, 0].float() + 0.2 * noise_VV

    def forward(self, batch: HeadBatch, loss: LossSpec, measure: bool = False) -> HeadOutput:
        raise AssertionError("a table is not trained")

    def start(self, capacity: int, rows: int = 1) -> None:
        return None

    def commit(self, *args: Any, **more: Any) -> None:
        pass

    def keep_rows(self, state: Any, rows: Tensor) -> None:
        pass

    def draft(self, state: Any, root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None) -> DraftTree:
        first_B1V = self.table_VV[root_B][:, None]

        def expand(output: Tensor, path_BWD: Tensor, seen: Tensor) -> Tensor:
            return self.table_VV[path_BWD[:, :, -1]]

        def same(output: Tensor) -> Tensor:
            return output

        return grow(root_B, first_B1V, policy, expand, same, sampler=sampler)


def pair(dtype: torch.dtype = torch.float32, eos: int | None = None) -> tuple[TargetAdapter, DraftHead]:
    model = pair_model()
    model.generation_config.eos_token_id = eos
    target = TargetAdapter(model.to(dtype), name="tiny")
    return target, PairHead(target)


def run(target: TargetAdapter, head: DraftHead, **options: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {"policy": POLICY, "max_new_tokens": 12, "draws": 600, **options}
    return audit(target, head, PROMPTS, **chosen)


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in result["checks"]}


# ---- the statistics ----------------------------------------------------------------------------------------


def test_g_test_by_hand() -> None:
    """Two cells: G = 2 (30 ln 1.5 + 10 ln 0.5), and the tail of one degree of freedom is erfc(sqrt(G / 2))."""
    g, cells, p = g_test([30, 10], [20.0, 20.0])
    assert g == pytest.approx(2 * (30 * math.log(1.5) + 10 * math.log(0.5))) and cells == 2
    assert p == pytest.approx(math.erfc(math.sqrt(g / 2)))
    g, cells, p = g_test([30, 0, 10], [15.0, 15.0, 10.0])  # a cell that nothing fell into; two degrees: exp(-G / 2)
    assert g == pytest.approx(2 * 30 * math.log(2)) and cells == 3 and p == pytest.approx(math.exp(-g / 2))
    assert g_test([20, 20], [20.0, 20.0]) == (0.0, 2, 1.0)


def test_rare_cells_are_merged() -> None:
    """1 + 2 + 3 = 6 make a cell that expects enough."""
    merged = g_test([0, 4, 3, 13], [1.0, 2.0, 3.0, 14.0])
    assert merged == g_test([7, 13], [6.0, 14.0]) and merged[1] == 2
    assert g_test([1, 2], [1.0, 2.0])[1:] == (1, 1.0)  # too few draws to tell anything


def test_p_values_of_a_right_sampler_are_even() -> None:
    """200 tables of 500 draws from the law itself: p <= 0.1 about 20 times (12 .. 30: 98 %; the seed is fixed)."""
    law = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
    drawn = torch.multinomial(law, 200 * 500, replacement=True, generator=torch.Generator().manual_seed(1))
    tables = [torch.bincount(part, minlength=5).tolist() for part in drawn.view(200, 500)]
    values = [g_test(table, (500 * law).tolist())[2] for table in tables]
    assert 12 <= sum(p <= 0.1 for p in values) <= 30 and min(values) > 1e-4
    wrong = (500 * torch.tensor([0.3, 0.4, 0.15, 0.1, 0.05])).tolist()
    assert all(g_test(table, wrong)[2] < 1e-4 for table in tables)


# ---- the law -----------------------------------------------------------------------------------------------


def top4(model: Any, ids: list[int]) -> dict[int, float]:
    scores, tokens = model(torch.tensor([ids])).logits[0, -1].double().topk(4)
    return dict(zip(tokens.tolist(), scores.softmax(-1).tolist(), strict=True))


def test_law() -> None:
    """Against the products of the model's own top-4 probabilities, prefix by prefix."""
    target, _ = pair()
    law = enumerate_law(target, PROMPTS[1])
    assert len(law.probability) == 64 and sum(law.probability.values()) == pytest.approx(1)
    with torch.no_grad():
        for first, p1 in top4(target.model, PROMPTS[1]).items():
            for second, p2 in top4(target.model, [*PROMPTS[1], first]).items():
                for third, p3 in top4(target.model, [*PROMPTS[1], first, second]).items():
                    assert law.probability[first, second, third] == pytest.approx(p1 * p2 * p3, rel=1e-4)
        cuts = []
        for prefix in {outcome[:n] for outcome in law.probability for n in range(3)}:
            best = target.model(torch.tensor([[*PROMPTS[1], *prefix]])).logits[0, -1].topk(5).values
            cuts.append(float(best[3] - best[4]))
    assert law.cut_gap == pytest.approx(min(cuts), abs=1e-5)


def test_an_outcome_ends_with_eos() -> None:
    target, _ = pair()
    eos = next(iter(top4(target.model, PROMPTS[1])))
    law = enumerate_law(pair(eos=eos)[0], PROMPTS[1])
    assert (eos,) in law.probability and sum(law.probability.values()) == pytest.approx(1)
    assert all(eos not in outcome[:-1] for outcome in law.probability)
    assert all(len(outcome) == 3 or outcome[-1] == eos for outcome in law.probability)


# ---- the audit ---------------------------------------------------------------------------------------------


def test_a_right_decoder_passes() -> None:
    """In full precision, and with an end-of-sequence token among the likely ones. Fails by chance in 6 of 10,000
    seeds; this one is fixed."""
    said: list[str] = []
    first = top4(pair()[0].model, PROMPTS[0][-16:])
    for eos in (None, list(first)[1]):
        result = run(*pair(eos=eos), seed=1, say=said.append)
        assert result["passed"] and set(verdicts(result).values()) == {"pass"}
        assert len(result["checks"]) == 5 and result["false_failure_rate"] == pytest.approx(3e-4)
        for check in result["checks"][2:]:
            assert check["draws"] == 600 and check["cells"] > 5 and check["off_support"] == 0
        assert all(check["parted"] == 0 for check in result["checks"][:2])
        json.dumps(result, allow_nan=False)
    assert any("3/3 prompts" in line for line in said) and any("rule sampled: pass" in line for line in said)
    text = format_audit(result)
    assert text.count("PASS ") == 5 and text.splitlines()[-1].startswith("LOSSLESS")


def test_a_wrong_temperature_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every score doubled, for target and draft alike: greedy texts stay, drawn ones must not pass."""
    real = Processing.scores

    def sharper(self: Processing, *args: Any) -> Tensor:
        return 2 * real(self, *args)

    monkeypatch.setattr(Processing, "scores", sharper)
    result = run(*pair(), draws=2000)
    assert [check["verdict"] for check in result["checks"]] == ["pass", "pass", "fail", "fail", "fail"]
    assert not result["passed"] and format_audit(result).splitlines()[-1].startswith("NOT PROVED")


def test_children_sorted_by_their_tokens_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest tokens instead of drawn ones, reported as drawn from q: the mistake of transformers 5.24's
    single-position candidates. Only the rule that relies on q suffers."""
    target, head = pair()
    honest = head.draft

    def draft(state: Any, root: Tensor, policy: TreePolicy, sampler: Any = None) -> Any:
        if sampler is None:
            return honest(state, root, policy)

        def cheat(logits: Tensor, path: Tensor, children: int) -> tuple[Tensor, Tensor]:
            _, q = sampler(logits, path, children)
            return q.topk(children).indices, q

        return honest(state, root, policy, cheat)

    monkeypatch.setattr(head, "draft", draft)
    found = verdicts(run(target, head, draws=2000))
    assert found.pop("sampled, rule sampled") == "fail" and set(found.values()) == {"pass"}


def test_impossible_tokens_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that drops the processors."""
    monkeypatch.setattr(module, "_draw", without_processors)
    result = run(*pair(), draws=200)
    for check in result["checks"][2:]:
        assert check["verdict"] == "fail" and check["off_support"] > 0


def without_processors(target: Any, head: Any, law: Any, options: Any, seeds: Any) -> dict[tuple[int, ...], int]:
    stop = StopRule(frozenset(), 3)
    rows = [RowRequest(law.prompt_ids, stop, seed=seed) for seed in seeds]
    found: dict[tuple[int, ...], int] = {}
    for row in decode(target, head, rows, options):
        found[tuple(row.ids)] = found.get(tuple(row.ids), 0) + 1
    return found


def test_the_tables_drafts_are_taken_and_refused() -> None:
    """Else the tests here would say little."""
    target, head = pair()
    law = enumerate_law(target, PROMPTS[0][-16:])
    assert len(law.probability) == 64 and max(law.probability.values()) < 0.1
    for rule, proposal in module._RULES:
        options = DecodeOptions(policy=POLICY, rule=rule, proposal=proposal)
        rows = [RowRequest(law.prompt_ids, StopRule(frozenset(), 12), module._processors(), seed=n) for n in range(20)]
        taus = [row.stats.tau for row in decode(target, head, rows, options)]
        assert 1.2 < sum(tau for tau in taus if tau) / len(taus) < 3


class TextHead(PairHead):
    """Drafts a known text, each right token behind a wrong sibling, so that what is accepted must be moved."""

    def __init__(self, target: TargetAdapter, text: list[int]) -> None:
        super().__init__(target)
        self.text, self.decided = text, 1

    def commit(self, state: Any, feature_BAF: Tensor, next_token_BA: Tensor, counts: Any = None) -> None:
        self.decided += next_token_BA.shape[1] if counts is None else counts[0]

    def draft(self, state: Any, root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None) -> DraftTree:
        right = (self.text[self.decided :] + [0] * policy.depth)[: policy.depth]
        token, parent, depth = [int(root_B[0])], [-1], [0]
        for level, truth in enumerate(right, 1):
            token += [(truth + 1) % VOCAB, truth]
            parent += 2 * [2 * level - 2]
            depth += [level, level]
        one = (torch.tensor([token]), torch.tensor([parent]), torch.tensor([depth]))
        return DraftTree(*one, -one[2].float())


def test_a_cache_that_forgets_to_move_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted nodes stay in the wrong slots: the text parts from plain decoding's."""
    target = TargetAdapter(tiny_model("llama"))
    stop, options = StopRule(frozenset(), 30), DecodeOptions(policy=POLICY)
    text = library_greedy(target.model, PROMPTS[0], 30)

    def check() -> dict[str, Any]:
        head = TextHead(target, [*PROMPTS[0], *text])
        found = module._decode_rows(target, head, PROMPTS[:1], stop, options, 1)
        return module._greedy_check(target, "greedy", PROMPTS[:1], [text], found, None)

    assert check()["verdict"] == "pass"
    monkeypatch.setattr(SlotCache, "_move", lambda *args: None)
    broken = check()
    assert broken["verdict"] == "fail" and broken["unexplained"] == broken["parted"] == 1
    assert 0 < broken["gap_largest"] < 100


def test_half_precision_has_a_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences at near-ties are explained; the others are not. A top-k cut within the noise decides nothing."""
    target, head = pair(torch.bfloat16)
    result = run(target, head, draws=300)
    noise = result["settings"]["noise"]
    assert noise >= 0  # 0 on processors that round passes of one token and of many alike
    assert all(check["tolerance"] == 2 * noise for check in result["checks"][:2])
    assert all(check["verdict"] == "pass" for check in result["checks"][:2])

    def wrong(*args: Any) -> Any:
        return [[(token + 1) % 512 for token in ids] for ids in decode_rows(*args)]

    decode_rows = module._decode_rows
    monkeypatch.setattr(module, "_decode_rows", wrong)
    monkeypatch.setattr(module, "replay", lambda *args, **more: module.Replay([0.5], 0.1, None))
    result = run(target, head, draws=10)
    assert result["checks"][0]["verdict"] == "fail" and result["checks"][0]["unexplained"] == 3
    monkeypatch.setattr(module, "replay", lambda *args, **more: module.Replay([0.5], 0.3, None))
    result = run(target, head, draws=10)
    assert result["checks"][0]["verdict"] == "pass" and result["checks"][0]["parted"] == 3
    monkeypatch.setattr(module, "replay", lambda *args, **more: module.Replay([0.5], 50.0, None))
    result = run(target, head, draws=10)
    assert {check["verdict"] for check in result["checks"][2:]} == {"undecided"} and not result["passed"]


def test_draws_come_in_batches_and_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = pair()
    law = enumerate_law(target, PROMPTS[1])
    options = DecodeOptions(policy=POLICY, rule="match")
    whole = module._draw(target, head, law, options, range(7))
    assert sum(whole.values()) == 7
    monkeypatch.setattr(module, "_MOST_ROWS", 3)
    assert module._draw(target, head, law, options, range(7)) == whole
    parts = [module._draw(target, head, law, options, [seed]) for seed in range(7)]
    outcomes = itertools.chain.from_iterable(part.items() for part in parts)
    added: dict[tuple[int, ...], int] = {}
    for outcome, count in outcomes:
        added[outcome] = added.get(outcome, 0) + count
    assert added == whole


def test_no_prompt() -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        audit(*pair(), [])
