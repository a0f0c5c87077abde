"""An evaluation: each side's tokens, clock and turn, equality in full and half precision, going on after a kill."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.base import TreePolicy
from heads.checkpoint import save_head
from heads.target import TargetAdapter
from infer import audit, evaluation, library
from infer.engine import DecodeOptions, RowRequest, RowResult, decode
from infer.evaluation import EvalRequest, evaluate, open_results
from infer.prompts import Prompt
from infer.sampling import build_processors
from infer.stopping import StopRule
from tests.test_infer_audit import PairHead, pair_model
from tests.tiny import CONFIGS, library_greedy, prompt_ids, tiny_head, tiny_model

NEW = 10
LENGTHS = (9, 4, 6)
PROMPTS = [Prompt(f"p{n}", "even" if n % 2 == 0 else "odd", "") for n in range(len(LENGTHS))]
IDS = [prompt_ids(length, seed) for seed, length in enumerate(LENGTHS)]
GREEDY = DecodeOptions(policy=TreePolicy(3, 3, 8))
SAMPLED = DecodeOptions(policy=TreePolicy(3, 3, 8), rule="match")
WARM: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 20}


@pytest.fixture(scope="module", name="folder")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved head and a prompt file, for the hashes in the settings."""
    folder = tmp_path_factory.mktemp("evaluation")
    save_head(tiny_head(TargetAdapter(tiny_model("llama"), name="tiny")), folder / "head")
    (folder / "prompts.jsonl").write_text("{}\n")
    return folder


Make = Callable[..., EvalRequest]


@pytest.fixture(name="make")
def make_maker(folder: Path) -> Make:
    def make(dtype: torch.dtype = torch.float32, **changes: Any) -> EvalRequest:
        target = TargetAdapter(pair_model().to(dtype), name="tiny")
        base = EvalRequest(
            target=target,
            head=PairHead(target),
            options=GREEDY,
            max_new_tokens=NEW,
            prompts=PROMPTS,
            prompt_ids=IDS,
            head_dir=str(folder / "head"),
            eval_file=str(folder / "prompts.jsonl"),
            settings={"raw": True},
            argv=["--eval", "prompts.jsonl"],
            control_prompts=2,
        )
        return replace(base, **changes)

    return make


@pytest.fixture(name="run")
def make_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[EvalRequest], Any]:
    """Evaluates; gives the code, the report, and what was printed and said."""

    def run(request: EvalRequest) -> Any:
        said: list[str] = []
        out = tmp_path / "report.json"
        code = evaluate(request, open_results(str(out)), said.append)
        printed = capsys.readouterr().out
        report = json.loads(out.read_text())
        assert json.loads(printed.splitlines()[-1]) == report["overall"]
        return SimpleNamespace(code=code, report=report, printed=printed, said="\n".join(said))

    return run


def test_greedy(make: Make, run: Any) -> None:
    """All sides emit the library's tokens, in batches of one and ragged ones."""
    for rows in (1, 2):
        done = run(make(rows=rows))
        overall, divergence = done.report["overall"], done.report["divergence"]
        assert done.code == 0 and "error" not in done.said and "LOSSY" not in done.printed
        assert overall["identical_share"] == 1.0 and overall["tau"] >= 1.0
        for side in ("library", "plain", "spec"):
            assert overall[f"new_tokens_{side}"] == NEW * len(IDS)
            assert overall[f"tokens_per_second_{side}"] > 0 and overall[f"tokens_per_second_decode_{side}"] > 0
        assert overall["target_passes_library"] == overall["target_passes_plain"] == (NEW - 1) * len(IDS)
        assert overall["speedup"] == min(overall["speedup_library"], overall["speedup_plain"])
        assert (divergence["compared"], divergence["prompts"]) == (3, 0)
        assert (divergence["library"]["compared"], divergence["library"]["prompts"]) == (3, 0)
        assert (divergence["control"]["compared"], divergence["control"]["prompts"]) == (2, 0)
        assert 0 <= divergence["noise"] < 1e-3 and divergence["control_prompts"] == 2
        assert sum(done.report["acceptance"]["accepted_ranks"]) > 0
        assert [row["batch"] for row in done.report["prompts"]] == [index // rows for index in range(3)]
        assert "3/3 prompts" in done.said and "0 s left" in done.said


def test_settings_are_echoed(make: Make, run: Any) -> None:
    done = run(make(seed=5))
    meta = done.report["meta"]
    expected = {
        "raw": True,
        "tree": {"width": 3, "depth": 3, "total": 8, "static": None},
        "rule": "greedy",
        "proposal": "top_k",
        "lossy": None,
        "sampling": "greedy",
        "seed": 5,
        "batch": 1,
        "baselines": ["library", "plain"],
        "library_attention": "sdpa",
        "dtype": "float32",
        "max_new_tokens": NEW,
        "target": "tiny",
        "command": "infer/generate.py --eval prompts.jsonl",
        "torch": torch.__version__,
    }
    assert expected.items() <= meta.items()
    for key in ("hardware", "threads", "transformers", "commit", "head_sha256", "prompts_sha256"):
        assert key in meta and meta[key] != ""
        assert key in done.printed


def test_the_compiled_baseline_is_one_more_side(make: Make, run: Any) -> None:
    request = make(rows=2)
    batches: list[list[int]] = []

    def compiled(rows: Sequence[RowRequest]) -> list[RowResult]:
        results = decode(request.target, None, rows)
        batches.append([len(result.ids) for result in results])
        return results

    done = run(replace(request, plain_compiled=compiled))
    assert done.code == 0
    assert batches == [[8, 8], [8], [NEW, NEW], [NEW]]  # a warm-up of each shape, then each batch
    overall = done.report["overall"]
    assert overall["new_tokens_compiled"] == 3 * NEW and overall["speedup_compiled"] > 0
    assert done.report["divergence"]["compiled"]["prompts"] == 0
    assert done.report["meta"]["baselines"] == ["library", "plain", "compiled"]


def test_sides_take_turns(make: Make, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("_library", "_plain"):
        real = getattr(evaluation, name)

        def noted(*args: Any, real: Any = real, name: str = name) -> Any:
            order.append(name[1])
            return real(*args)

        monkeypatch.setattr(evaluation, name, noted)
    ours = evaluation._ours

    def head(request: Any, rows: Any, decoder: Any) -> Any:
        order.append("s")
        return ours(request, rows, decoder)

    monkeypatch.setattr(evaluation, "_ours", head)
    run(make())
    assert "".join(order) == "lps" + "lps" + "psl" + "slp"  # the warm-up, then three prompts


def test_one_clock_times_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on by a second at every look, a side's phases add up to what passed around it."""
    ticks = itertools.count()
    fake = lambda: float(next(ticks))  # noqa: E731
    monkeypatch.setattr(time, "perf_counter", fake)
    request = make(rows=2)
    taken: list[float] = []
    timed = library.timed

    def noted(*args: Any) -> Any:
        seconds, result = timed(*args)
        taken.append(seconds)
        return seconds, result

    for module in (library, evaluation):
        monkeypatch.setattr(module, "timed", noted)
    outcome = evaluation._decode_sides(request, [0, 1], StopRule(frozenset(), NEW), 0)
    assert list(outcome) == ["library", "plain", "spec"]
    for (_, rows), seconds in zip(outcome.items(), taken, strict=True):
        assert max(stats.total_seconds for _, stats in rows) == pytest.approx(seconds)
        assert all(stats.total_seconds <= seconds for _, stats in rows)
    # looks at the clock: before, at the call of generate, at its first token, after
    assert [stats.seconds["prefill"] for _, stats in outcome["library"]] == [1.0, 1.0]
    assert [stats.seconds["rest"] for _, stats in outcome["library"]] == [2.0, 2.0]


def test_drawn_tokens_of_rule_match_are_those_of_plain_decoding(make: Make, run: Any) -> None:
    for rows in (1, 3):
        request = make(
            options=SAMPLED,
            sampling=WARM,
            processors=lambda ids: build_processors(**WARM),
            library_kwargs=WARM,
            seed=3,
            rows=rows,
        )
        torch.manual_seed(7)
        before = torch.random.get_rng_state()
        done = run(request)
        assert torch.equal(torch.random.get_rng_state(), before)  # the library's draws leave no trace
        divergence = done.report["divergence"]
        assert done.code == 0 and done.report["meta"]["sampling"] == WARM
        assert done.report["overall"]["identical_share"] == 1.0 and divergence["prompts"] == 0
        assert "library" not in divergence and divergence["control"]["prompts"] == 0
        assert done.report["overall"]["new_tokens_library"] == 3 * NEW
    texts = {
        seed: [
            r.ids
            for r in decode(request.target, None, [RowRequest(IDS[0], StopRule(frozenset(), NEW), seed=seed)], SAMPLED)
        ]
        for seed in (3, 4)
    }
    assert texts[3] != texts[4]


def test_freely_drawn_tokens_are_not_compared(make: Make, run: Any) -> None:
    options = replace(SAMPLED, rule="top_k")
    done = run(make(options=options, processors=lambda ids: build_processors(**WARM), library_kwargs=WARM))
    assert done.code == 0 and done.report["overall"]["identical_share"] is None
    assert done.report["divergence"]["compared"] == 0 and "tokens were not compared" in done.printed


def test_a_lossy_rule_is_told_everywhere(make: Make, run: Any) -> None:
    done = run(make(options=replace(SAMPLED, rule="typical_lossy")))
    assert done.code == 0 and done.report["overall"]["lossy"] == done.report["meta"]["lossy"]
    assert done.printed.startswith("LOSSY: rule 'typical_lossy'") and "LOSSY: accept length" in done.said


def wrong_last_token(*args: Any) -> list[RowResult]:
    results = decode(*args)
    if args[1] is None:  # plain
        return results
    return [replace(r, ids=[*r.ids[:-1], (r.ids[-1] + 1) % 512]) for r in results]


def test_a_difference_in_full_precision_is_an_error(make: Make, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "decode", wrong_last_token)
    done = run(make())
    assert done.code == 1 and "error: 3 prompts differ from plain decoding in float32" in done.said
    divergence = done.report["divergence"]
    assert divergence["prompts"] == divergence["unexplained"] == 3 and divergence["library"]["prompts"] == 0
    model = make().target.model
    for row, ids in zip(done.report["prompts"], IDS, strict=True):
        assert row["first_divergence"] == NEW - 1
        text = [*ids, *library_greedy(model, ids, NEW - 1)]
        best = model(torch.tensor([text])).logits[0, -1].topk(2).values
        assert row["parted"]["spec"]["gap"] == pytest.approx(float(best[0] - best[1]), abs=1e-4)

    sampled = run(make(options=SAMPLED))
    assert sampled.code == 1 and "error: 3 prompts differ" in sampled.said
    half = run(make(torch.bfloat16))
    assert half.code == 0 and "error" not in half.said
    assert half.report["divergence"]["unexplained"] is not None and half.report["divergence"]["prompts"] == 3


def test_another_text_of_the_library_is_an_error(make: Make, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = evaluation._library

    def wrong(*args: Any) -> Any:
        return [([*ids[:-1], (ids[-1] + 1) % 512], stats) for ids, stats in real(*args)]

    monkeypatch.setattr(evaluation, "_library", wrong)
    done = run(make())
    assert done.code == 1 and "3 prompts of side 'library' differ" in done.said
    assert done.report["overall"]["identical_share"] == 1.0


def test_half_precision_measures_noise(make: Make, run: Any) -> None:
    done = run(make(torch.bfloat16))
    divergence = done.report["divergence"]
    assert done.code == 0 and divergence["noise"] > 0 and divergence["tolerance"] == 2 * divergence["noise"]
    assert divergence["control"]["compared"] == 2 and "tolerance for gaps" in done.printed
    assert run(make(torch.bfloat16, control_prompts=0)).report["divergence"]["tolerance"] is None


def test_the_library_runs_as_a_user_has_it(make: Make) -> None:
    """Its own attention; none of the model's generation settings; EOS counted, padding behind it not."""
    request = make(rows=2)
    model = request.target.model
    model.generation_config.update(repetition_penalty=1.5, max_length=3)
    before, attention = model.generation_config, request.target.config._attn_implementation
    right = [library_greedy(pair_model(), ids, NEW) for ids in IDS[:2]]
    eos = right[0][3]
    assert eos not in right[1][:4]
    seen: list[str] = []
    generate = model.generate

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(request.target.config._attn_implementation)
        return generate(*args, **kwargs)

    model.generate = noted
    for stops, ends in (([], [NEW, NEW]), ([eos], [4, NEW])):
        stop = StopRule(frozenset(stops), NEW)
        rows = [evaluation._row_request(request, index, stop) for index in (0, 1)]
        decoded = evaluation._library(request, rows, NEW)
        for (ids, stats), text, end in zip(decoded, right, ends, strict=True):
            cut = next((i + 1 for i, token in enumerate(text) if token in stops), end)
            assert ids == text[:cut] and stats.check().new_tokens == cut and stats.target_passes == cut - 1
    assert seen == ["sdpa", "sdpa"] and attention != "sdpa"
    assert model.generation_config is before and request.target.config._attn_implementation == attention


def test_every_compiled_shape_is_met_before(make: Make) -> None:
    """Caches come in steps of 256 slots, with 64 to spare."""
    plain, compiled = make(), make(plain_compiled=print)
    assert evaluation._shapes(plain, [[0], [1], [2]]) == [[0]]
    assert evaluation._shapes(compiled, [[0], [1], [2]]) == [[0]]
    assert evaluation._shapes(compiled, [[0, 1], [2]]) == [[0, 1], [2]]
    edge = 256 - 64 - 1 - 6  # without drafts the largest for a prompt of 6 tokens; with drafts too large for all
    assert evaluation._shapes(replace(compiled, max_new_tokens=edge), [[2], [1], [0]]) == [[2], [0]]
    drafts = make(options=replace(GREEDY, compiled=True))
    assert evaluation._shapes(drafts, [[1], [2]]) == [[1]]


def test_it_goes_on_after_a_kill(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[list[int]] = []
    real = evaluation._decode_sides

    def counted(request: Any, indices: Any, stop: Any, turn: int, warm_up: bool = False) -> Any:
        if not warm_up:
            if len(decoded) == 1:
                raise KeyboardInterrupt
            decoded.append(list(indices))
        return real(request, indices, stop, turn, warm_up)

    monkeypatch.setattr(evaluation, "_decode_sides", counted)
    out, said = tmp_path / "r.json", list[str]()
    with pytest.raises(KeyboardInterrupt):
        evaluate(make(rows=2), open_results(str(out)), said.append)
    assert decoded == [[0, 1]] and not out.exists()
    decoded.clear()
    assert evaluate(make(rows=2), open_results(str(out)), said.append) == 0
    assert decoded == [[2]] and any("after 2 finished prompts" in line for line in said)
    report = json.loads(out.read_text())
    assert [row["prompt_id"] for row in report["prompts"]] == ["p0", "p1", "p2"]
    assert report["overall"]["new_tokens_spec"] == 3 * NEW
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_other_settings_are_not_mixed(make: Make) -> None:
    base = make()
    same = base.fingerprint()
    assert same == make().fingerprint() == json.loads(json.dumps(same))
    for change in (
        {"rows": 2},
        {"seed": 1},
        {"options": SAMPLED},
        {"sampling": WARM},
        {"library_kwargs": WARM},
        {"plain_compiled": print},
        {"control_prompts": 0},
        {"max_new_tokens": 3},
    ):
        assert replace(base, **change).fingerprint() != same, change


def test_bad_requests(make: Make) -> None:
    with pytest.raises(ValueError, match="rows is 0"):
        make(rows=0)
    with pytest.raises(ValueError, match="control_prompts is -1"):
        make(control_prompts=-1)
    with pytest.raises(ValueError, match="prompt p1: "):
        evaluate(make(prompt_ids=[IDS[0], [], IDS[2]]), None, print)


# ---- one-token and tree-wide passes ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2])
def test_replay(rows: int) -> None:
    """Gaps are those of the library's logits; wide passes choose the same tokens and differ by rounding only."""
    model = tiny_model("llama")
    target = TargetAdapter(model)
    new = library_greedy(model, IDS[0], NEW)
    found = audit.replay(target, IDS[0], new, 6, rows=rows)
    logits = model(torch.tensor([[*IDS[0], *new]])).logits[0, len(IDS[0]) - 1 : -1]
    best = logits.topk(2).values
    assert found.gaps == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-4)
    assert 0 <= found.noise < 1e-4 and found.parts_at is None
    assert audit.replay(target, IDS[0], new).gaps == pytest.approx(found.gaps, abs=1e-4)


def test_replay_sees_what_width_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of several tokens push one token up by 0.5, and from the third on by 100: noise, then another choice."""
    target = TargetAdapter(tiny_model("llama"))
    new = library_greedy(target.model, IDS[0], 6)
    real, wide_passes = target.forward, 0

    def pushed(ids: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal wide_passes
        out = real(ids, *args, **kwargs)
        if ids.shape[1] == 4:
            wide_passes += 1
            token = next(t for t in range(512) if t not in new)
            out.logits_BNV[:, 0, token] += 100 if wide_passes == 3 else 0.5
        return out

    monkeypatch.setattr(target, "forward", pushed)
    found = audit.replay(target, IDS[0], new, 4)
    assert found.parts_at == 3 and found.noise == pytest.approx(100, abs=1e-3)
    assert wide_passes == 5
    wide_passes = 0
    monkeypatch.undo()
    assert audit.replay(target, IDS[0], new, 4).parts_at is None


def test_replay_draws_as_plain_decoding_does() -> None:
    target = TargetAdapter(tiny_model("llama"))
    processors = build_processors(**WARM)
    row = RowRequest(IDS[0], StopRule(frozenset(), NEW), processors, seed=11)
    new = decode(target, None, [row], DecodeOptions(rule="match"))[0].ids
    found = audit.replay(target, IDS[0], new, 5, audit.Chooser(processors, 11))
    assert found.parts_at is None and found.noise < 1e-4


def test_replay_near_the_last_position() -> None:
    """Wide passes reach one position too far; that must not break models with a table of positions."""
    config = CONFIGS["gpt2"]
    target = TargetAdapter(tiny_model(config))
    limit = target.max_positions
    assert limit == 64
    ids = prompt_ids(limit - 4)
    new = library_greedy(target.model, ids, 4)
    assert audit.replay(target, ids, new, 5).noise < 1e-3
