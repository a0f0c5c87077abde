"""Decoding with static trees: exact, without padding, from files, and by the command."""

from __future__ import annotations

import argparse
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
from heads.growing import grow
from heads.static import StaticTree
from heads.target import TargetAdapter
from heads.tree import DraftTree, Proposal
from infer.audit import audit
from infer.baseline import decode_plain
from infer.benchmark import _ways
from infer.engine import DecodeOptions, RowRequest, decode
from infer.generate import main
from infer.loading import Loaded
from infer.speculate import speculate
from infer.stopping import StopRule
from infer.trees import TREE_NAME, policy_of, read_tree, write_tree
from tests.oracle import limited_head
from tests.tiny import CONFIGS, library_greedy, prompt_ids, tiny_head, tiny_model, tiny_target, tiny_tokenizer

# Leaves at depths 2, 3 and 4, and a rank left out.
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (2, 0), (0, 0, 0), (0, 2, 0), (1, 0, 0), (0, 0, 0, 1)))
LEAVES = ((2, 0), (0, 2, 0), (0, 0, 0, 1), (1, 0, 0))
POLICY = TreePolicy.of(TREE)
PROMPTS = [prompt_ids(length, seed=length) for length in (7, 1, 12, 4)]
LIMITS = [20, 24, 9, 1]


def rows(eos: frozenset[int] = frozenset()) -> list[RowRequest]:
    pairs = zip(PROMPTS, LIMITS, strict=True)
    return [RowRequest(prompt, StopRule(eos, limit), seed=i) for i, (prompt, limit) in enumerate(pairs)]


class ScriptedHead(DraftHead):
    """Drafts the text at the ranks of one path of the tree, and wrong tokens everywhere else."""

    needs = Needs()

    def __init__(self, target: TargetAdapter, text: Sequence[int], path: Sequence[int]) -> None:
        super().__init__(HeadConfig.derive("eagle", target.config, target.vocab_size, target.name))
        self.text, self.path, self.seen = text, path, 0  # prompt and answer; tokens before the root

    def forward(self, batch: HeadBatch, loss: LossSpec, measure: bool = False) -> HeadOutput:
        raise AssertionError("not trained")

    def unroll(self, batch: HeadBatch) -> Iterator[Tensor]:
        raise AssertionError("not trained")

    def start(self, capacity: int, rows: int = 1) -> None:
        self.seen = 0

    def commit(
        self, state: Any, feature_BAF: Tensor, next_token_BA: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        self.seen += next_token_BA.shape[1]

    def keep_rows(self, state: Any, rows: Tensor) -> None:
        pass

    def draft(self, state: Any, root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None) -> DraftTree:
        def logits(path: list[int]) -> Tensor:
            """Ranks 0, 1, .. are wrong tokens; the true one takes the script's rank, if the path is right so far."""
            follows = [*self.text[self.seen + 1 :], *[1] * 9]
            depth, truth = len(path), follows[len(path)]
            order = [(truth + 1 + i) % self.config.vocab_size for i in range(9)]
            if path == follows[:depth] and depth < len(self.path):
                order.insert(self.path[depth], truth)
            row = torch.full((self.config.vocab_size,), -9.0)
            row[torch.tensor(order)] = -torch.arange(len(order)).float()
            return row

        def expand(output: Tensor, path_BFD: Tensor, seen: Tensor) -> Tensor:
            return torch.stack([logits(path) for path in path_BFD[0].tolist()])[None]

        return grow(root_B, logits([])[None, None], policy, expand, lambda x: x)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_greedy_text_is_the_librarys(name: str) -> None:
    """Alone and in a ragged batch whose rows end at different times."""
    model = tiny_model(name)
    want = [library_greedy(model, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    target = tiny_target(name)
    together = decode(target, tiny_head(target), rows(), DecodeOptions(POLICY))
    assert [result.ids for result in together] == want
    for row, text in zip(rows(), want, strict=True):
        result = decode(target, tiny_head(target), [row], DecodeOptions(POLICY))[0]
        assert result.ids == text and result.stats.check().new_tokens == len(text)
    eos = want[1][11]
    results = decode(target, tiny_head(target), rows(frozenset({eos})), DecodeOptions(POLICY))
    assert [result.ids for result in results] == [t[: t.index(eos) + 1] if eos in t else t for t in want]


def test_sampled_text_is_that_of_plain_sampling() -> None:
    target = tiny_target("llama")
    plain = decode(target, None, rows(), DecodeOptions(rule="match"))
    static = decode(target, tiny_head(target), rows(), DecodeOptions(POLICY, rule="match"))
    assert [result.ids for result in static] == [result.ids for result in plain]


@pytest.mark.parametrize("path", TREE.paths, ids=str)
def test_accepted_is_the_path_that_is_right(path: tuple[int, ...]) -> None:
    target = tiny_target("llama")
    prompt = PROMPTS[0]
    text = library_greedy(tiny_model("llama"), prompt, 40)
    head = ScriptedHead(target, [*prompt, *text], path)
    result = decode(target, head, [RowRequest(prompt, StopRule(frozenset(), 30))], DecodeOptions(POLICY))[0]
    assert result.ids == text[:30]
    assert set(result.stats.accepted_per_round[:-1]) == {len(path)}


def test_there_is_no_padding_that_could_be_accepted() -> None:
    """Implementations that pad short paths with id 0 accept a padded place when the target's own next token is 0.

    Each token of the text becomes id 0 in turn, by exchanging its rows with those of 0; now and then it follows a leaf
    of depth 2, 3 or 4. A tree holds its own nodes and no more, and what is accepted ends at the leaf.
    """
    prompt = PROMPTS[0]
    text = library_greedy(tiny_model("llama"), prompt, 24)
    after_a_leaf = 0
    for number, token in enumerate(dict.fromkeys(text)):
        exchange = {token: 0, 0: token}
        model = tiny_model("llama")
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight.data[[0, token]] = weight.data[[token, 0]]
        target = TargetAdapter(model, name="exchanged")
        mine = [exchange.get(one, one) for one in prompt]
        want = [exchange.get(one, one) for one in text]
        assert 0 in want and decode_plain(target, mine, StopRule(frozenset(), 24))[0] == want
        leaf = LEAVES[number % len(LEAVES)]
        head = ScriptedHead(target, [*mine, *want, *[1] * 9], leaf)
        blocks: list[list[int]] = []
        row = RowRequest(mine, StopRule(frozenset(), 24), on_block=lambda ids, _, b=blocks: b.append(ids))  # type: ignore[misc]
        result = decode(target, head, [row], DecodeOptions(POLICY))[0]
        assert result.ids == want and set(result.stats.accepted_per_round[:-1]) == {len(leaf)}
        after_a_leaf += any(block[-1] == 0 for block in blocks[1:-1])
    assert after_a_leaf > 3


def test_what_the_head_or_the_tree_cannot_do_is_refused() -> None:
    target = tiny_target("llama")
    limited, eagle = limited_head(target), tiny_head(target)
    for head, options, told in (
        (
            limited,
            DecodeOptions(TreePolicy(2, 4, 9)),
            "tree depth is 4, head 'eagle' drafts at most 3 .*: lower --tree-d",
        ),
        (limited, DecodeOptions(POLICY), "tree depth is 4, head 'eagle' drafts at most 3 tokens: give a tree that"),
        (
            limited,
            DecodeOptions(TreePolicy(2, 3, 9), "sampled", "sampled"),
            "proposal is 'sampled', head 'eagle' knows",
        ),
        (
            eagle,
            DecodeOptions(POLICY, "sampled", "sampled"),
            "proposal is 'sampled', a static tree drafts the likeliest",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            decode(target, head, rows()[:1], options)


def test_audit_leaves_out_what_does_not_go_together() -> None:
    target = tiny_target("llama")
    said: list[str] = []
    found = audit(target, tiny_head(target), PROMPTS[:2], policy=POLICY, max_new_tokens=8, draws=200, say=said.append)
    names = [check["name"] for check in found["checks"]]
    assert found["passed"] and "sampled, rule match" in names and "sampled, rule sampled" not in names
    assert any("rule sampled is left out" in line for line in said)
    found = audit(target, limited_head(target), PROMPTS[:1], max_new_tokens=8, draws=50)
    assert found["settings"]["tree"]["depth"] == 3 and len(found["checks"]) == 4


# ---- files and the command ---------------------------------------------------------------------------------


def test_a_tree_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / TREE_NAME
    write_tree(path, TREE, {"rows": 3, "accuracy": {"1": [0.5, 0.25]}})
    assert read_tree(path) == TREE
    text = path.read_text()
    data = json.loads(text)
    assert next(iter(data)) == "draftsmith_tree" and data["draftsmith_tree"] == 1
    assert data["paths"] == [list(one) for one in TREE.paths] and data["source"]["rows"] == 3
    assert '    "rows": 3,\n' in text and '"paths": [[0], [0, 0],' in text  # for people to read
    write_tree(path, StaticTree(((0,),)), {})
    assert read_tree(path).nodes == 2 and [file.name for file in path.parent.iterdir()] == [TREE_NAME]
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"tree\.json exists and is not a Draftsmith tree, so it is not overwritten"):
        write_tree(path, TREE, {})
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "is not a file; expected a tree written by scripts/fit_tree.py"),
        ("{", 'is not a tree; expected JSON with "draftsmith_tree": 1'),
        ("[[0]]", "is not a tree"),
        ('{"paths": [[0]]}', "is not a tree"),
        ('{"draftsmith_tree": 2, "paths": [[0]]}', "is not a tree"),
        ('{"draftsmith_tree": 1}', "paths is None"),
        ('{"draftsmith_tree": 1, "paths": {"0": 1}}', "paths is {'0': 1}"),
        ('{"draftsmith_tree": 1, "paths": [[0], [1, 1]]}', r"path \[1, 1\] has no parent"),
        ('{"draftsmith_tree": 1, "paths": [[0], 1]}', "path is 1"),
    ],
    ids=str,
)
def test_what_is_no_tree_file_is_told(tmp_path: Path, content: str | None, told: str) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"t\.json.*{told}"):
        read_tree(path)


@pytest.fixture(scope="module", name="place")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a head for it with its tree, another head without, and prompts."""
    place = tmp_path_factory.mktemp("static")
    tokenizer = tiny_tokenizer()
    config = CONFIGS["llama"].to_dict() | {"vocab_size": len(tokenizer)}
    model = tiny_model(type(CONFIGS["llama"])(**config))
    model.save_pretrained(place / "target")
    tokenizer.save_pretrained(place / "target")
    head = tiny_head(TargetAdapter(model, name=str(place / "target")))
    save_head(head, place / "bare")
    save_head(head, place / "head")
    write_tree(place / "head" / TREE_NAME, TREE, {})
    (place / "prompts.jsonl").write_text('{"prompt": "Hello"}\n{"prompt": "1+1?"}\n')
    return place


def test_the_tree_beside_the_head_is_taken(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, bare = str(place / "head"), str(place / "bare")
    file = str(place / "head" / TREE_NAME)

    def tree_of(*options: str) -> tuple[dict[str, Any], str]:
        out = place / "report.json"
        out.unlink(missing_ok=True)
        size = ["--max-new-tokens", "10", "--limit", "1"]
        code = main(["--eval", str(place / "prompts.jsonl"), "--json", str(out), *size, *options])
        err = capsys.readouterr().err
        assert code == 0, err
        report = json.loads(out.read_text())
        assert report["overall"]["identical_share"] in (1.0, None)  # None: sampled
        return report["meta"]["tree"], err

    tree, err = tree_of("--head", own)
    assert tree["static"]["paths"] == [list(path) for path in TREE.paths] and tree["total"] == TREE.nodes
    assert [line for line in err.splitlines() if "tree" in line] == [f"tree: {file}, static, depth 4, 12 nodes"]
    assert tree_of("--head", bare, "--tree", file)[0] == tree
    shape = {"width": 6, "depth": 4, "total": 16, "static": None}
    assert tree_of("--head", bare)[0] == tree_of("--head", own, "--tree", "dynamic")[0] == shape
    assert tree_of("--head", own, "--tree-width", "3")[0] == shape | {"width": 3}
    assert tree_of("--head", own, "--tree", "dynamic", "--tree-depth", "2")[0] == shape | {"depth": 2}
    sampled = ["--temperature", "1", "--proposal", "sampled"]
    tree, err = tree_of("--head", own, *sampled)
    assert tree == shape and f"tree: dynamic, since the children of {file} are not drawn" in err


@pytest.mark.parametrize(
    ("wrong", "code", "told"),
    [
        (["--tree", "{place}/head/tree.json", "--tree-width", "2"], 2, "tells the whole tree"),
        (["--tree", "{place}/head/tree.json", "--chain", "2"], 2, "tells the whole tree"),
        (["--tree", "auto", "--tree-nodes", "2"], 2, "tells the whole tree"),
        (["--tree", "{place}/head/tree.json", "--plain"], 2, "--plain drafts nothing"),
        (["--tree", "dynamic", "--plain"], 2, "--plain drafts nothing"),
        (["--tree", "nowhere"], 1, "nowhere is not a file"),
        (["--tree", "{place}/prompts.jsonl"], 1, "prompts.jsonl is not a tree"),
        (
            ["--tree", "{place}/head/tree.json", "--temperature", "1", "--proposal", "sampled"],
            1,
            "a static tree drafts the likeliest children",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_trees_are_told(
    place: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], code: int, told: str
) -> None:
    argv = ["--head", str(place / "bare"), "--prompt", "a", *(part.format(place=place) for part in wrong)]
    if code == 2:
        with pytest.raises(SystemExit) as error:
            main(argv)
        assert error.value.code == 2
    else:
        assert main(argv) == 1
    assert told in capsys.readouterr().err


def test_the_benchmark_has_it_too(place: Path) -> None:
    args = argparse.Namespace(head=str(place / "head"), tokens=6, compile=False)
    target = TargetAdapter(tiny_model(type(CONFIGS["llama"]).from_pretrained(place / "target")), name="t")
    ways = _ways(Loaded(target, limited_head(target), tiny_tokenizer()), args, 1)
    assert "static, depth 4, 12 nodes" in ways and "width 6, depth 3, 16 nodes" in ways
    args.head = str(place / "bare")
    ways = _ways(Loaded(target, limited_head(target), tiny_tokenizer()), args, 1)
    assert not any("static" in name for name in ways)
    assert all(way([[5, 9, 77]])[0].new_tokens == 6 for way in ways.values())


def test_speculate_takes_trees_and_files(place: Path) -> None:
    model = tiny_model(type(CONFIGS["llama"]).from_pretrained(place / "target"))
    ids = torch.tensor([[5, 9, 77]])
    want = library_greedy(model, [5, 9, 77], 12)
    for head, tree, depth in (
        (place / "head", None, 4),
        (place / "bare", place / "head" / TREE_NAME, 4),
        (place / "bare", StaticTree(((0,), (0, 0))), 2),
        (place / "bare", TreePolicy(2, 3, 6), 3),
    ):
        out = speculate(model, head, ids, tree=tree, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert out.new_ids == [want] and max(out.stats[0].offered_depth_per_round) == depth
    sampled: Proposal = "sampled"
    eagle = tiny_head(TargetAdapter(model, name="t"))
    assert policy_of(None, eagle, place / "head", sampled) == TreePolicy() == policy_of(None, eagle, None, "top_k")
    assert policy_of(None, limited_head(TargetAdapter(model, name="t")), None, "top_k") == TreePolicy(6, 3, 16)
