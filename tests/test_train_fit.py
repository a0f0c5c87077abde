"""Fitting trees: ranks against a slow oracle and against real drafts, and the command from end to end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import ChildSampler, DraftHead, HeadBatch, HeadOutput, LossSpec, Needs, TreePolicy
from heads.checkpoint import save_head
from heads.config import HeadConfig
from heads.static import StaticTree
from heads.target import TargetAdapter
from heads.tree import DraftTree
from infer.calibration import NODES
from infer.fitting import MISS, UNKNOWN, Accuracy
from infer.prefill import prefill
from infer.trees import TREE_NAME, read_tree
from scripts.fit_tree import main
from tests.tiny import VOCAB, prompt_ids, tiny_head, tiny_model, tiny_target, tiny_tokenizer
from train.config import RunConfig
from train.conversations import TokenRow
from train.feature_cache import build_feature_cache
from train.features import FeatureSource
from train.fit_cli import _features_folder
from train.ranks import Ranks, measure_ranks
from train.resume import RUN_YAML
from train.stage import prepare_rows
from train.typed_yaml import dump_yaml, from_dict

STEPS, RANKS, ENTRIES = 4, 6, 509


def entry(position: Any, token: Any) -> Any:
    return (31 * position + token) % ENTRIES


class PlantedHead(DraftHead):
    """Gives the target's token the rank that a table has for the step, the position and the token."""

    needs = Needs()

    def __init__(self, target: TargetAdapter, rank_KM: Tensor, ids: Tensor | None = None) -> None:
        vocab = None if ids is None else len(ids)
        super().__init__(HeadConfig.derive("eagle", target.config, target.vocab_size, target.name, None, vocab))
        if ids is not None:
            self.draft_token_ids.copy_(ids)
        self.scale = torch.nn.Parameter(torch.ones(1))  # heads have a dtype
        self.rank_KM = rank_KM
        self.bind(target)

    def unroll(self, batch: HeadBatch) -> Iterator[Tensor]:
        for step in range(batch.steps):
            token_BT = self.target.logits(batch.teacher[step]).argmax(-1)
            rank_BT = self.rank_KM[step, entry(torch.arange(token_BT.shape[1]), token_BT)]
            yield torch.stack([token_BT, rank_BT], -1).float()

    def step_logits(self, step: int, output: Tensor) -> Tensor:
        """Columns from likely to unlikely, but the token's is put where its rank wants it."""
        ids = torch.arange(VOCAB) if self.draft_ids is None else self.draft_ids
        logits = -torch.arange(len(ids)).float().repeat(len(output), 1)
        for row, (token, rank) in enumerate(output.tolist()):
            column = (ids == token).nonzero()
            if len(column):
                logits[row, column] = -rank + 0.5 - (int(column) < rank)
        return logits

    def forward(self, batch: HeadBatch, loss: LossSpec, measure: bool = False) -> HeadOutput:
        raise AssertionError("not trained")

    def start(self, capacity: int, rows: int = 1) -> Any:
        raise AssertionError("does not decode")

    def commit(self, *args: Any, **more: Any) -> None:
        raise AssertionError("does not decode")

    def draft(self, state: Any, root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None) -> DraftTree:
        raise AssertionError("does not decode")

    def keep_rows(self, state: Any, rows: Tensor) -> None:
        raise AssertionError("does not decode")


def answered(target: TargetAdapter, number: int, length: int, stray: float) -> TokenRow:
    """A prompt and an answer that is the target's greedy one, but for a token now and then."""
    generator = torch.Generator().manual_seed(number)
    ids = prompt_ids(5 + number % 4, seed=number)
    start = len(ids)
    with torch.inference_mode():
        for _ in range(length):
            token = int(target.model(torch.tensor([ids])).logits[0, -1].argmax())
            if float(torch.rand((), generator=generator)) < stray:
                token = int(torch.randint(VOCAB, (), generator=generator))
            ids.append(token)
    middle = start + length // 2
    spans = ((start, len(ids)),) if number % 3 else ((start, middle - 1), (middle, len(ids)))
    return TokenRow(f"row{number}", tuple(ids), spans, "test")


def measured(
    target: TargetAdapter, head: DraftHead, rows: Sequence[TokenRow], folder: Path, ranks: int = RANKS
) -> Ranks:
    features = build_feature_cache(FeatureSource(target, head.needs.taps), rows, folder, log=lambda text: None)
    return measure_ranks(head, rows, features, STEPS, ranks, lambda text: None)


@pytest.fixture(scope="module", name="target")
def make_target() -> TargetAdapter:
    return tiny_target("llama")


@pytest.fixture(scope="module", name="rows")
def make_rows(target: TargetAdapter) -> list[TokenRow]:
    return [answered(target, number, 24, stray=0.15) for number in range(12)]


@pytest.mark.parametrize("ids", [None, torch.arange(0, VOCAB, 2)], ids=["all tokens", "draft vocabulary"])
def test_ranks_against_a_slow_oracle(
    target: TargetAdapter, rows: list[TokenRow], ids: Tensor | None, tmp_path: Path
) -> None:
    rank_KM = torch.randint(9, (STEPS, ENTRIES), generator=torch.Generator().manual_seed(1))
    found = measured(target, PlantedHead(target, rank_KM, ids), rows, tmp_path)
    want, row_of = [], []
    for number, row in enumerate(rows):
        tokens = row.input_ids
        best = target.model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()  # best[i] should follow token i
        for root in range(len(tokens) - 2):
            end = next((stop for start, stop in row.spans if start <= root + 1 and root + 2 < stop), None)
            if end is None:
                continue
            ranks = []
            for step in range(STEPS):
                place = root + 2 + step  # of the drafted token
                if place >= end or any(tokens[i] != best[i - 1] for i in range(root + 2, place)):
                    ranks.append(UNKNOWN)
                    continue
                token = best[place - 1]
                rank = int(rank_KM[step, entry(root, token)])
                ranks.append(rank if rank < RANKS and (ids is None or token in ids) else MISS)
            want.append(ranks)
            row_of.append(number)
    assert found.rank_RK.tolist() == want and found.row_R.tolist() == row_of
    for value in (MISS, UNKNOWN, 0):
        assert bool((found.rank_RK == value).any())


def test_planted_accuracies_are_recovered(target: TargetAdapter, rows: list[TokenRow], tmp_path: Path) -> None:
    planted = torch.tensor([[0.5, 0.2, 0.0, 0.1], [0.4, 0.3, 0.1, 0.0], [0.6, 0.0, 0.1, 0.1], [0.3, 0.3, 0.2, 0.0]])
    weights = torch.cat([planted, 1 - planted.sum(1, keepdim=True)], 1)
    rank_KM = torch.multinomial(weights, ENTRIES, replacement=True, generator=torch.Generator().manual_seed(2))
    rank_KM[rank_KM == 4] = RANKS + 2  # a miss
    found = Accuracy.of(measured(target, PlantedHead(target, rank_KM), rows, tmp_path).rank_RK, RANKS)
    assert found.tried[0] > 200 and list(found.tried) == sorted(found.tried, reverse=True)
    for step in range(STEPS):
        assert found.share[step][4:] == (0.0, 0.0)
        assert found.share[step][:4] == pytest.approx(planted[step].tolist(), abs=4 * 0.5 / found.tried[step] ** 0.5)


def test_ranks_are_those_of_real_drafts(target: TargetAdapter, tmp_path: Path) -> None:
    """Along the target's own text a tree drafted by EAGLE has the token at the rank that was measured, or misses it."""
    head = tiny_head(target)
    row = answered(target, 1, 24, stray=0.0)
    width, depth = 150, 3
    found = measured(target, head, [row], tmp_path, ranks=width)
    ids, (start, end) = list(row.input_ids), row.spans[0]
    assert len(found.rank_RK) == end - start - 1
    few = [(rank,) for rank in range(width)]
    _, features = prefill(target, [ids], target.new_cache(len(ids)), head.needs)
    assert features is not None
    seen = 0
    for place, ranks in enumerate(found.rank_RK.tolist()):
        at = start + place  # of the tree's root
        state = head.start(len(ids) + width * depth)
        head.commit(state, features[:, :at], torch.tensor([ids[1 : at + 1]]))
        path: tuple[int, ...] = ()
        for step, rank in enumerate(ranks[:depth]):
            if rank == UNKNOWN:
                break
            paths = tuple(path[: n + 1] for n in range(step)) + tuple((*path, *one) for one in few)
            tree = head.draft(state, torch.tensor([ids[at]]), TreePolicy.of(StaticTree(paths)))
            offered = tree.token_BN[0, tree.depth_BN[0] == step + 1].tolist()
            truth = ids[at + 1 + step]
            assert rank == (offered.index(truth) if truth in offered else MISS)
            if rank == MISS:
                break
            seen += step > 0
            path = (*path, rank)
    assert seen


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="place")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, finished data, and a head with the config of its run."""
    place = tmp_path_factory.mktemp("fit")
    model = tiny_model("llama")
    model.save_pretrained(place / "target")
    tiny_tokenizer().save_pretrained(place / "target")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(24):
        text = "".join(map(chr, torch.randint(97, 123, (30,), generator=generator).tolist()))
        rows.append({"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": text}]})
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = from_dict(
        RunConfig,
        {
            "target": {"path": str(place / "target"), "device": "cpu"},
            "head": {"draft_vocab": None},
            "data": {"path": str(place / "rows.jsonl"), "work_dir": str(place / "data"), "held_out": 0.3},
            "train": {"output_dir": str(place / "run"), "max_steps": 1},
        },
    )
    held_out = prepare_rows(config, "cpu", lambda text: None).held_out
    assert len(held_out) > 4
    head = tiny_head(TargetAdapter(model, name=str(place / "target")))
    save_head(head, place / "head", {RUN_YAML: dump_yaml(config)})
    (place / "prompts.jsonl").write_text('{"prompt": "Hello"}\n{"prompt": "1+1?"}\n')
    return place


def fitted(place: Path, capsys: pytest.CaptureFixture[str], *more: str, head: str = "head") -> tuple[Any, str, str]:
    argv = ["--head", str(place / head), "--threads", "1", "--max-rank", "60", "--depth", "3", *more]
    assert main(argv) == 0
    shown = capsys.readouterr()
    return json.loads(shown.out.splitlines()[-1]), shown.out, shown.err


def test_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = place / "head" / TREE_NAME
    check = ["--check", str(place / "prompts.jsonl"), "--check-limit", "1", "--tokens", "12"]
    summary, shown, err = fitted(place, capsys, "--nodes", "7", *check)
    assert summary["tree"] == str(file) and f"wrote {file}" in err and "features: " in err
    tree = read_tree(file)
    assert tree.nodes == summary["nodes"] == 7 and tree.depth == summary["depth"] <= 3
    assert summary["expected_accept_length"] > 1 and summary["measured_accept_length"] >= 1
    assert summary["replayed_accept_length"] >= 1 and summary["tokens_per_second"] is None
    assert "replayed on the other half" in shown and "7 nodes, depth" in shown
    source = json.loads(file.read_text())["source"]
    for name in ("head_sha256", "target", "rows", "roots", "command", "versions", "date", "machine", "sizes"):
        assert source[name], name
    assert source["costs"] is None and len(source["accuracy_by_depth_and_rank"]["3"]) == 60
    assert "--nodes 7" in source["command"] and source["places_by_depth"][0] == source["roots"]

    costs = ["--repeats", "1", "--context", "16", "--limit", "4"]
    summary, shown, err = fitted(place, capsys, *costs)
    source = json.loads(file.read_text())["source"]
    assert source["rows"] == 4 and source["costs"]["rows"] == 1 and "costs: 1 of 1" in err
    assert {one["nodes"] for one in source["sizes"]} <= set(NODES)
    best = max(source["sizes"], key=lambda one: one["tokens_per_second"])
    assert summary["nodes"] == best["nodes"] == read_tree(file).nodes
    assert summary["tokens_per_second"] == best["tokens_per_second"]
    assert best["tokens_per_second"] == pytest.approx(1000 * best["expected"] / best["round_ms"])
    assert "plain decoding" in shown and " *" in shown
    faster = summary["tokens_per_second"] > summary["plain_tokens_per_second"]
    assert (summary["note"] is None) == faster and ("which is written all the same" in shown) != faster

    (place / "mine").write_text("mine")
    for wrong, told in (
        (["--out", str(place / "mine")], "exists and is not a Draftsmith tree"),
        (["--nodes", "1"], "--nodes is 1, expected 2 or more"),
        (["--nodes", "many"], "--nodes is 'many', expected a number or auto"),
        (["--max-rank", "0"], "--max-rank is 0, expected 1 or more"),
        (["--max-rank", "513"], "--max-rank is 513, the draft vocabulary 512"),
        (["--data", str(place)], "holds no stage.json"),
        (["--limit", "0"], "--limit is 0"),
    ):
        assert main(["--head", str(place / "head"), *wrong]) == 1
        assert told in capsys.readouterr().err
    assert (place / "mine").read_text() == "mine"


def test_data_and_file_of_ones_own(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head without the config of its run needs to be told the rows."""
    save_head(tiny_head(tiny_target("llama")), tmp_path / "head")
    config = json.loads((tmp_path / "head/config.json").read_text()) | {"target": str(place / "target")}
    (tmp_path / "head/config.json").write_text(json.dumps(config))
    assert main(["--head", str(tmp_path / "head"), "--nodes", "4"]) == 1
    assert "holds no run.yaml of a training run: give --data and --limit" in capsys.readouterr().err
    more = ["--data", str(place / "data"), "--limit", "3", "--nodes", "4", "--out", str(tmp_path / "t.json")]
    assert fitted(tmp_path, capsys, *more)[0]["tree"] == str(tmp_path / "t.json")
    assert read_tree(tmp_path / "t.json").nodes == 4
    record = json.loads((place / "data/stage.json").read_text())
    other = tmp_path / "data"
    other.mkdir()
    record["key"]["target.path"] = "another"
    (other / "stage.json").write_text(json.dumps(record))
    assert main(["--head", str(tmp_path / "head"), "--data", str(other), "--limit", "3"]) == 1
    assert "holds rows of target 'another'" in capsys.readouterr().err


def test_features_of_another_target_are_kept_apart(tmp_path: Path) -> None:
    key = {"rows": 4, "target": "t", "adapter": None}
    usual = tmp_path / "features_held_out_4"
    assert _features_folder(tmp_path, key) == usual
    usual.mkdir()
    (usual / "manifest.json").write_text(json.dumps(key))
    assert _features_folder(tmp_path, key) == usual
    others = {_features_folder(tmp_path, key | {"adapter": adapter}) for adapter in ("a", "b", "a")}
    assert len(others) == 2 and all(one.parent == tmp_path and one != usual for one in others)
