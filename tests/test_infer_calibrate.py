"""Calibration: predicted rounds are those of real decoding, and the choice follows costs and acceptance."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import ChildSampler, DraftHead, HeadBatch, HeadOutput, LossSpec, Needs, TreePolicy, candidates
from heads.checkpoint import save_head
from heads.config import HeadConfig
from heads.growing import grow
from heads.target import TargetAdapter
from heads.tree import DraftTree, paths
from infer.acceptance import Acceptance, measure_acceptance, path_ranks
from infer.benchmark import TREES
from infer.calibrate import main
from infer.calibration import CALIBRATION, Calibration, calibrate, choose, load_or_measure
from infer.costs import SIZES, CalibrationRequest, Costs, measure_costs, non_decreasing
from infer.engine import DecodeOptions, RowRequest, decode
from infer.stopping import StopRule
from tests.oracle import limited_head
from tests.tiny import CONFIGS, VOCAB, prompt_ids, tiny_head, tiny_model, tiny_target, tiny_tokenizer

SMALL = CalibrationRequest("head", context=12, tokens=40, repeats=1, sizes=(1, 2, 4, 8, 16))
POLICIES = [
    TreePolicy(1, 1, 2),
    TreePolicy(1, 3, 4),
    TreePolicy(1, 6, 7),
    TreePolicy(4, 2, 6),
    TreePolicy(4, 3, 8),
    TreePolicy(4, 6, 24),
    TreePolicy(8, 2, 16),
    TreePolicy(8, 6, 16),
    TreePolicy(8, 6, 64),
]


def quiet(text: str) -> None:
    pass


class GuessingHead(DraftHead):
    """Grows real trees over noise that depends on the path alone; on the right path the right token is likelier."""

    needs = Needs()

    def __init__(self, target: TargetAdapter, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(HeadConfig.derive("eagle", target.config, target.vocab_size, target.name))
        self.texts = texts  # prompt and answer
        self.trees: list[TreePolicy] = []

    def forward(self, batch: HeadBatch, loss: LossSpec, measure: bool = False) -> HeadOutput:
        raise AssertionError("not trained")

    def start(self, capacity: int, rows: int = 1) -> list[list[int]]:
        return [[] for _ in range(rows)]

    def commit(
        self, state: list[list[int]], feature_BAF: Tensor, next_token_BA: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        for row, seen in enumerate(state):
            count = next_token_BA.shape[1] if counts is None else counts[row]
            seen += next_token_BA[row, :count].tolist()

    def keep_rows(self, state: list[list[int]], rows: Tensor) -> None:
        state[:] = [state[row] for row in rows.tolist()]

    def draft(
        self, state: list[list[int]], root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None
    ) -> DraftTree:
        (seen,) = state
        text = next(text for text in self.texts if list(text[1 : 1 + len(seen)]) == seen)
        self.trees.append(policy)
        place = len(seen)  # of the root
        assert root_B.tolist() == [text[place]]

        def expand(node_BW2: Tensor, path_BWD: Tensor, seen_BWS: Tensor) -> Tensor:
            token_BW, level = path_BWD[:, :, -1], path_BWD.shape[2]
            noise = (node_BW2[..., 0] * 1009 + token_BW + 1) % 1_000_003
            return torch.stack([noise, node_BW2[..., 1] * (token_BW == text[place + level])], -1)

        def logits_of(node_BW2: Tensor) -> Tensor:
            rows = [self._logits(int(noise), text) for noise, _ in node_BW2[0].tolist()]
            logits_BWV = torch.stack(rows)[None]
            depth = depths.pop(0)
            logits_BWV[..., text[place + depth]] += 9.0 * node_BW2[..., 1]
            return logits_BWV

        depths = list(range(1, policy.depth + 1))
        root_112 = torch.tensor([[[float(place), 1.0]]], dtype=torch.float64)
        return grow(root_B, root_112, policy, expand, logits_of)

    def _logits(self, noise: int, text: Sequence[int]) -> Tensor:
        return 3.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(noise))


# ---- acceptance --------------------------------------------------------------------------------------------


def test_replayed_rounds_are_those_of_decoding() -> None:
    target = tiny_target("llama")
    prompts = [prompt_ids(9), prompt_ids(5, seed=1)]
    stop = StopRule(frozenset(), SMALL.tokens)
    texts = [[*ids, *decode(target, None, [RowRequest(ids, stop)])[0].ids] for ids in prompts]
    head = GuessingHead(target, texts)
    acceptance = measure_acceptance(target, head, prompts, SMALL, quiet)
    assert {(tree.width, tree.total) for tree in head.trees} == {(w, candidates(w, 6)) for w in SMALL.widths}
    assert Acceptance.from_dict(json.loads(json.dumps(acceptance.to_dict()))) == acceptance
    taus = []
    for policy in POLICIES:
        expected = acceptance.replay(policy)
        found = []
        for ids, rounds in zip(prompts, expected, strict=True):
            stats = decode(target, head, [RowRequest(ids, stop)], DecodeOptions(policy=policy))[0].stats
            assert stats.target_passes >= len(rounds) > 5
            found.append(stats.accepted_per_round[: len(rounds)])
        assert found == expected, policy
        flat = [accepted for rounds in expected for accepted in rounds]
        taus.append(acceptance.tau(policy))
        assert taus[-1] == pytest.approx(1 + sum(flat) / len(flat))
    assert taus[0] < taus[1] < taus[-1] and len({round(tau, 6) for tau in taus}) > 5, taus  # the test sees something


def test_ranks_tell_what_a_smaller_tree_keeps() -> None:
    """With a real head: the tree of fewer nodes and levels, drafted from the same state."""
    target = tiny_target("llama")
    head = tiny_head(target)
    generator = torch.Generator().manual_seed(3)
    state = head.start(64)
    head.commit(state, torch.randn(1, 7, target.hidden_size, generator=generator), torch.tensor([prompt_ids(7)]))
    root_1 = torch.tensor([5])

    def texts_of(tree: DraftTree) -> list[tuple[int, ...]]:
        tokens = tree.token_BN[0].tolist()
        return [tuple(tokens[node] for node in path[1:]) for path in paths(tree.parent_BN[0])]

    width, depth = 3, 4
    whole = head.draft(state, root_1, TreePolicy(width, depth, candidates(width, depth)))
    assert whole.nodes == candidates(width, depth)
    for levels in range(1, depth + 1):
        for nodes in (2, 4, 7, 12, 25):
            kept = {()} | {
                text
                for text in texts_of(whole)
                if text and len(text) <= levels and path_ranks(whole, text, depth)[-1][levels - len(text)] < nodes
            }
            small = texts_of(head.draft(state, root_1, TreePolicy(width, levels, nodes)))
            assert kept == set(small) and len(kept) == len(small)


def test_a_head_of_limited_depth() -> None:
    target = tiny_target("llama")
    head = limited_head(target)
    acceptance = measure_acceptance(target, head, [prompt_ids(9)], SMALL, quiet)
    assert acceptance.depth == 3 and acceptance.tau(TreePolicy(1, 3, 4)) >= 1
    costs = measure_costs(target, head, SMALL, quiet)
    choice = choose(replace(costs, target_ms=dict.fromkeys(SIZES, 1.0)), acceptance)
    assert {offer.policy.depth for offer in choice.table} == {1, 2, 3}
    whole = [one.limited(head.max_depth) for one in TREES]
    assert [(one.width, one.depth, one.total) for one in whole[:3]] == [(1, 3, 4), (4, 3, 8), (6, 3, 16)]
    for policy in whole:
        decode(target, head, [RowRequest(prompt_ids(9), StopRule(frozenset(), 8))], DecodeOptions(policy))


def test_answers_too_short_to_measure() -> None:
    target = tiny_target("llama")
    first = decode(target, None, [RowRequest(prompt_ids(9), StopRule(frozenset(), 1))])[0].ids[0]
    target.model.generation_config.eos_token_id = first
    with pytest.raises(ValueError, match=r"the answers end within 6 tokens.*--tokens"):
        measure_acceptance(target, tiny_head(target), [prompt_ids(9)], SMALL, quiet)
    with pytest.raises(ValueError, match=r"tokens is 6, expected 7 or more: change --tokens"):
        replace(SMALL, tokens=6)


# ---- costs -------------------------------------------------------------------------------------------------


def costs_of(target_ms: Callable[[int], float], first: float = 0.0, level: float = 0.0, rows: int = 1) -> Costs:
    return Costs(
        target_ms={n: float(target_ms(n)) for n in SIZES},
        commit_ms=0.0,
        first_ms=dict.fromkeys((1, 4, 8), first),
        level_ms=dict.fromkeys((1, 4, 8), level),
        overhead_ms=0.0,
        plain_overhead_ms=0.0,
        rows=rows,
        context=256,
        dtype="float32",
        device="a machine",
        threads=1,
        target="t",
        head="h",
        versions={},
    )


def test_costs_are_measured() -> None:
    target = tiny_target("llama")
    said: list[str] = []
    costs = measure_costs(target, tiny_head(target), replace(SMALL, rows=2), said.append)
    assert set(costs.target_ms) == set(SMALL.sizes) and min(costs.target_ms.values()) > 0
    assert set(costs.first_ms) == set(costs.level_ms) == set(SMALL.widths)
    assert min(costs.first_ms.values()) > 0 and costs.commit_ms > 0
    assert min(costs.overhead_ms, costs.plain_overhead_ms, *costs.level_ms.values()) >= 0
    assert (costs.rows, costs.context, costs.dtype) == (2, 12, "float32")
    assert len(said) == 2 and all(" s left" in line for line in said)
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


def test_costs_of_compiled_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sizes that compiled passes have. (Captured as always, but run by torch's own kernels.)"""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    target = tiny_target("llama")
    head = tiny_head(target, kind="medusa")
    costs = measure_costs(target, head, replace(SMALL, compiled=True), quiet)
    assert costs.compiled and set(costs.target_ms) == {1, 4, 8, 16} and min(costs.first_ms.values()) > 0
    assert counters["unique_graphs"] - before >= 4 + 6  # passes, and drafts of 3 widths, 2 depths
    spread = replace(costs, target_ms={1: 1.0, 4: 2.0, 8: 5.0, 16: 9.0})
    assert [spread.target_at(n) for n in (1, 2, 4, 5, 8, 9)] == [1, 2, 2, 5, 5, 9]
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


def test_costs_need_room() -> None:
    target = tiny_target("gpt2")  # 64 positions
    with pytest.raises(ValueError, match=r"--context 60 .* has 64 positions"):
        measure_costs(target, tiny_head(target), replace(SMALL, context=60), quiet)


def test_between_measured_sizes() -> None:
    costs = costs_of({n: n for n in SIZES}.__getitem__)
    assert costs.target_at(3) == 3 and costs.target_at(20) == 20 and costs.target_at(128) == 128
    bumpy = replace(costs, target_ms={1: 10.0, 4: 16.0, 8: 12.0, 16: 30.0})
    assert bumpy.target_at(4) == 16 and bumpy.target_at(8) == 12  # as measured
    assert bumpy.target_at(6) == 14 and bumpy.target_at(2) == pytest.approx(10 + 4 / 3)
    with pytest.raises(AssertionError, match=r"pass of 17 tokens, measured 1 \.\. 16"):
        bumpy.target_at(17)


def test_non_decreasing() -> None:
    assert non_decreasing([1.0, 2.0, 2.0, 5.0]) == [1.0, 2.0, 2.0, 5.0]
    assert non_decreasing([3.0, 2.0, 1.0, 4.0]) == [2.0, 2.0, 2.0, 4.0]
    assert non_decreasing([1.0, 6.0, 2.0, 4.0]) == [1.0, 4.0, 4.0, 4.0]


def test_a_round_is_the_sum_of_its_parts() -> None:
    costs = replace(costs_of(lambda n: 10 + n, first=3.0, level=2.0), commit_ms=0.5, overhead_ms=0.25)
    assert costs.round_ms(TreePolicy(4, 3, 12)) == 22 + 0.5 + 3 + 2 * 2 + 0.25
    assert costs.round_ms(TreePolicy(4, 1, 64)) == 15 + 0.5 + 3 + 0.25  # it has 5 nodes at most
    assert replace(costs, plain_overhead_ms=1.0).plain_ms == 12


# ---- choice ------------------------------------------------------------------------------------------------


def acceptance_of(rates: dict[int, tuple[float, int]], places: int = 3000, depth: int = 6) -> Acceptance:
    """By width: every level is right with that chance, and the k-th right node has rank k * step."""
    ranks: dict[int, list[list[list[list[int]]]]] = {}
    for width, (rate, step) in rates.items():
        right_PD = torch.rand(places, depth, generator=torch.Generator().manual_seed(width)) < rate
        lengths = right_PD.long().cumprod(1).sum(1).tolist()
        ranks[width] = [[[[k * step] * (depth - k + 1) for k in range(1, n + 1)] for n in lengths]]
    return Acceptance(depth, ranks)


def test_drafts_too_dear_for_what_they_bring() -> None:
    choice = choose(costs_of(lambda n: 1.0, first=0.5, level=0.5), acceptance_of({1: (0.3, 1)}))
    assert choice.policy is None and choice.tokens_per_second == choice.plain_tokens_per_second == 1000
    assert choice.break_even_tau == 1.5
    best = choice.table[0]
    assert best.policy == TreePolicy(1, 1, 2) and best.tau == pytest.approx(1.3, abs=0.04)  # 4 standard errors
    assert choice.reason == (
        f"plain decoding, 1000.0 tokens/s: the best tree (chain of 1) has an accept length of {best.tau:.2f} "
        "and pays only above 1.50"
    )


RATES = {1: (0.6, 1), 4: (0.8, 6), 8: (0.85, 10)}  # the wider, the more often right, at the price of more nodes


def test_steep_costs_take_a_chain() -> None:
    choice = choose(costs_of(lambda n: 10 + 3 * (n - 1), first=0.5, level=0.5), acceptance_of(RATES))
    assert choice.policy is not None and choice.policy.width == 1
    assert choice.tokens_per_second > choice.plain_tokens_per_second
    assert choice.reason.startswith(f"chain of {choice.policy.depth}: accept length ")


def test_flat_costs_take_a_big_tree() -> None:
    choice = choose(costs_of(lambda n: 10.0, first=0.5, level=0.1), acceptance_of(RATES))
    assert choice.policy == TreePolicy(8, 6, 64)
    # Where only nodes are dear, fewer are taken.
    fewer = choose(costs_of(lambda n: 10 + 0.2 * (n - 1), first=0.5, level=0.1), acceptance_of(RATES)).policy
    assert fewer is not None and 2 < fewer.total < 64


def test_the_best_is_first_and_rows_add_up() -> None:
    acceptance = acceptance_of(RATES)
    one = choose(costs_of(lambda n: 10 + n / 4, first=1.0, level=1.0), acceptance)
    speeds = [offer.tokens_per_second for offer in one.table]
    assert speeds == sorted(speeds, reverse=True) and one.tokens_per_second == speeds[0]
    for offer in one.table:
        assert offer.tokens_per_second == pytest.approx(1000 * offer.tau / offer.round_ms)
        assert offer.policy.depth < offer.policy.total <= candidates(offer.policy.width, offer.policy.depth)
        assert (offer.tau > offer.break_even_tau) == (offer.tokens_per_second > one.plain_tokens_per_second)
    four = choose(costs_of(lambda n: 10 + n / 4, first=1.0, level=1.0, rows=4), acceptance)
    assert four.policy == one.policy and four.tokens_per_second == pytest.approx(4 * one.tokens_per_second)
    assert len(one.to_dict(3)["table"]) == 3 and json.dumps(one.to_dict())


# ---- storage -----------------------------------------------------------------------------------------------


def test_a_calibration_is_measured_once(tmp_path: Path) -> None:
    path, measured, said = tmp_path / "deep" / "c.json", list[str](), list[str]()

    def of(name: str) -> Callable[[], Calibration]:
        def measure() -> Calibration:
            measured.append(name)
            return Calibration({"threads": name, "more": 1}, costs_of(float), acceptance_of({1: (0.5, 1)}, places=9))

        return measure

    first = load_or_measure(path, {"threads": "a"}, of("a"), said.append)
    assert load_or_measure(path, {"threads": "a", "more": 1}, of("again"), said.append) == first
    assert measured == ["a"]
    load_or_measure(path, {"threads": "b"}, of("b"), said.append)
    assert measured == ["a", "b"] and "other settings (threads)" in said[-2]

    path.write_text(json.dumps({**json.loads(path.read_text()), CALIBRATION.mark: 0}))
    load_or_measure(path, {"threads": "b"}, of("c"), said.append)
    assert measured[2:] == ["c"] and "another version" in said[-2]
    assert [file.name for file in path.parent.iterdir()] == ["c.json"]

    for foreign in ("{}", "text", "[1]"):
        path.write_text(foreign)
        with pytest.raises(ValueError, match="is not a Draftsmith calibration"):
            load_or_measure(path, {"threads": "b"}, of("d"), quiet)
        assert path.read_text() == foreign
    assert measured[3:] == []


def test_without_prompts_nothing_is_measured(place: Path, tmp_path: Path) -> None:
    target = tiny_target("llama")
    request = replace(SMALL, head_dir=str(place / "head"))
    with pytest.raises(ValueError, match=r"run: python infer/calibrate\.py --head .* --rows 1 --prompts FILE"):
        calibrate(target, tiny_head(target), request, None, quiet, tmp_path)
    with pytest.raises(ValueError, match=r"run: python .* --rows 1 --compile --prompts FILE"):
        calibrate(target, tiny_head(target), replace(request, compiled=True), None, quiet, tmp_path)


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="place")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a head for it and a prompt set."""
    place = tmp_path_factory.mktemp("calibrate")
    tokenizer = tiny_tokenizer()
    config = CONFIGS["llama"].to_dict() | {"vocab_size": len(tokenizer)}
    model = tiny_model(type(CONFIGS["llama"])(**config))
    model.save_pretrained(place / "target")
    tokenizer.save_pretrained(place / "target")
    save_head(tiny_head(TargetAdapter(model, name=str(place / "target"))), place / "head")
    rows = [{"prompt": "Tell me a story."}, {"prompt": "1+1?"}, {"prompt": "Name a colour."}]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_command(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def calibrated(*more: str) -> tuple[Any, str, str]:
        files = ["--head", str(place / "head"), "--prompts", str(place / "prompts.jsonl")]
        size = ["--limit", "2", "--tokens", "10", "--context", "16", "--repeats", "1", "--cache-dir", str(tmp_path)]
        assert main([*files, *size, *more]) == 0
        shown = capsys.readouterr()
        return json.loads(shown.out.splitlines()[-1]), shown.out, shown.err

    out = tmp_path / "out.json"
    summary, shown, err = calibrated("--json", str(out))
    assert "2 prompts" in err and "s left" in err
    assert "tokens per row" in shown and "accept length by depth" in shown and "plain decoding" in shown
    assert f"chosen: {summary['reason']}" in shown.splitlines()
    assert summary["key"]["rows"] == 1 and summary["key"]["dtype"] == "float32" and len(summary["table"]) == 5
    (stored,) = (tmp_path / "calibration").iterdir()
    report = json.loads(out.read_text())
    assert report["costs"] == json.loads(stored.read_text())["costs"] and "--limit 2" in report["command"]
    assert report["choice"]["reason"] == summary["reason"]

    again, _, err = calibrated()
    assert again == summary and "s left" not in err and str(stored) in err
    _, _, err = calibrated("--tokens", "11")
    assert "other settings (tokens)" in err and "s left" in err
    calibrated("--tokens", "11", "--rows", "2")
    assert len(list((tmp_path / "calibration").iterdir())) == 2

    out.write_text("mine")
    for wrong, told in (
        (("--rows", "0"), "error: rows is 0, expected 1 or more: change --rows"),
        (("--json", str(out)), "out.json exists and is not a Draftsmith calibration, so it is not overwritten"),
    ):
        assert main(["--head", "nowhere", "--prompts", str(place / "prompts.jsonl"), *wrong]) == 1
        assert told in capsys.readouterr().err
    assert out.read_text() == "mine"
