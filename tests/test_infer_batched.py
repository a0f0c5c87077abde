"""Continuous batched decoding: greedy as the library's, sampled by the law it states, rows that are their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from heads.packed import Piece
from infer.batched import BatchedDecoder, Program, Request, decode_all, sample_rows
from infer.passes import PackedPasses, PaddedPasses, Passes, make_passes
from tests.tiny import ARCHITECTURES, CONFIGS, library_greedy, prompt_ids, tiny_model, tiny_target

PROMPTS = [prompt_ids(length, seed=length) for length in (7, 1, 12, 4, 7, 9)]
NEW = 14
NO_STOP: frozenset[int] = frozenset()


def requests(temperature: float = 0.0, seed: int = 0) -> list[Request]:
    return [Request(prompt, NEW, temperature, 100 * seed + i) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(params=[PackedPasses, PaddedPasses])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Passes]:
    """Both kinds of passes on targets that could have either."""
    if request.param is PaddedPasses:
        monkeypatch.setattr("infer.passes.can_pack", lambda target: False)
    chosen: type[Passes] = request.param
    return chosen


# --- greedy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 4, 6])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_rows_are_the_librarys(name: str, rows: int, kind: type[Passes]) -> None:
    """Also when rows take the places of others."""
    model, target = tiny_model(name), tiny_target(name)
    before = target.config._attn_implementation
    got = decode_all(target, requests(), 8, NO_STOP, rows=rows)
    assert got == [library_greedy(model, prompt, NEW) for prompt in PROMPTS]
    assert target.config._attn_implementation == before


def test_rows_end_at_their_stop_and_do_not_change_others(kind: type[Passes]) -> None:
    """Each row's own 1st, 2nd, ... token ends it, so places are taken over one after the other."""
    model, target = tiny_model("llama"), tiny_target("llama")
    whole = [library_greedy(model, prompt, NEW) for prompt in PROMPTS]
    stops = frozenset(text[i] for i, text in enumerate(whole))
    want = [text[: 1 + next(i for i, t in enumerate(text) if t in stops)] for text in whole]
    assert len({len(text) for text in want}) > 2
    counted: list[int] = []
    assert decode_all(target, requests(), 8, stops, rows=2, on_tokens=counted.append) == want
    assert sum(counted) == sum(map(len, want))


def spy(monkeypatch: pytest.MonkeyPatch, decoder: BatchedDecoder) -> list[list[Piece]]:
    """The pieces of every pass from now on."""
    runs: list[list[Piece]] = []
    run = decoder.passes.run

    def recorded(pieces: list[Piece]) -> torch.Tensor:
        runs.append(pieces)
        return run(pieces)

    monkeypatch.setattr(decoder.passes, "run", recorded)
    return runs


def test_a_further_request_goes_on_behind_the_first(monkeypatch: pytest.MonkeyPatch, kind: type[Passes]) -> None:
    """A row that asks again: the answer, some glue, the next answer. And one that starts anew with other ids."""
    model, target = tiny_model("llama"), tiny_target("llama")
    glue, other = [5, 6, 7], prompt_ids(9, seed=99)

    def turns(prompt: list[int]) -> Program[list[list[int]]]:
        first = yield Request(prompt, 5)
        second = yield Request([*prompt, *first, *glue], 6)
        third = yield Request(other, 4)
        return [first, second, third]

    results: list[list[list[int]]] = []
    decoder = BatchedDecoder(target, 2, 40, 8, NO_STOP)
    pieces = spy(monkeypatch, decoder)
    decoder.run(map(turns, PROMPTS), results.append)
    expected = []
    for prompt in PROMPTS:
        first = library_greedy(model, prompt, 5)
        second = library_greedy(model, [*prompt, *first, *glue], 6)
        expected.append([first, second, library_greedy(model, other, 4)])
    assert sorted(results) == sorted(expected)
    # Nothing twice: prompt and 4 tokens, the 5th with the glue and 5 more, the other prompt and 3.
    total = sum(len(piece.ids) for run in pieces for piece in run)
    assert total == sum(len(prompt) + 4 + 4 + 5 + 9 + 3 for prompt in PROMPTS)


def test_a_common_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch, kind: type[Passes]) -> None:
    model, target = tiny_model("llama"), tiny_target("llama")
    prefix = prompt_ids(70, seed=3)  # longer than a piece
    prompts = [[*prefix, *prompt] for prompt in PROMPTS] + [prefix, PROMPTS[0]]
    decoder = BatchedDecoder(target, 3, 120, 8, NO_STOP, prefix)
    pieces = spy(monkeypatch, decoder)
    assert run_all(decoder, prompts) == [library_greedy(model, prompt, NEW) for prompt in prompts]
    total = sum(len(piece.ids) for run in pieces for piece in run)
    assert total == sum(map(len, PROMPTS)) + len(prefix) + len(PROMPTS[0]) + len(prompts) * (NEW - 1)


def run_all(decoder: BatchedDecoder, prompts: list[list[int]]) -> list[list[int]]:
    results: dict[int, list[int]] = {}

    def program(index: int) -> Program[tuple[int, list[int]]]:
        return index, (yield Request(prompts[index], NEW))

    decoder.run(map(program, range(len(prompts))), lambda found: results.update([found]))
    return [results[index] for index in range(len(prompts))]


def test_long_prompts_go_in_pieces_beside_rows_that_decode(monkeypatch: pytest.MonkeyPatch, kind: type[Passes]) -> None:
    model, target = tiny_model("llama"), tiny_target("llama")
    prompts = [prompt_ids(length, seed=length) for length in (200, 150, 64, 129, 65, 1, 190, 128, 9, 3)]
    decoder = BatchedDecoder(target, 5, 220, 8, NO_STOP)
    pieces = spy(monkeypatch, decoder)
    assert run_all(decoder, prompts) == [library_greedy(model, prompt, NEW) for prompt in prompts]
    assert {len(piece.ids) for run in pieces for piece in run} == {1, 3, 8, 9, 22, 62, 64}
    assert max(sum(len(piece.ids) for piece in run) for run in pieces) <= decoder.passes.tokens
    assert any({1, 64} <= {len(piece.ids) for piece in run} for run in pieces)


def test_waiting_for_programs_and_fewer_rows_than_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(prompt: list[int]) -> Program[list[int]]:
        return (yield Request(prompt, 3))

    def source() -> Iterator[Program[list[int]] | None]:
        for prompt in PROMPTS:
            yield None
            yield program(prompt)
        yield None

    results: list[list[int]] = []
    decoder = BatchedDecoder(tiny_target("llama"), 6, 40, 8, NO_STOP)
    pieces = spy(monkeypatch, decoder)
    decoder.run(source(), results.append, limit=2)
    assert sorted(results) == sorted(library_greedy(tiny_model("llama"), prompt, 3) for prompt in PROMPTS)
    assert max(map(len, pieces)) == 2


def test_a_program_may_ask_for_nothing() -> None:
    def program(asks: bool) -> Program[str]:
        if asks:
            yield Request([1], 2)
        return "done" if asks else "nothing"

    results: list[str] = []
    BatchedDecoder(tiny_target("llama"), 1, 40, 8, NO_STOP).run(map(program, (False, True, False)), results.append)
    assert results == ["nothing", "done", "nothing"]


@pytest.mark.parametrize(("ids", "new"), [([], 3), ([1, 2], 0), ([1] * 38, 3)])
def test_what_does_not_fit_is_refused(ids: list[int], new: int) -> None:
    decoder = BatchedDecoder(tiny_target("llama"), 1, 40, 8)

    def program() -> Program[None]:
        yield Request(ids, new)

    with pytest.raises(ValueError, match=f"{len(ids)} ids and {new} new tokens asked for, expected"):
        decoder.run([program()], lambda result: None)


# --- a row is its own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sampled_rows_do_not_depend_on_their_companions(name: str) -> None:
    """Alone, together, in another order, with other rows beside them: the same ids, by their seeds."""
    target, asked = tiny_target(name), requests(1.0)
    whole = decode_all(target, asked, 8, NO_STOP)
    assert whole == [decode_all(target, [one], 8, NO_STOP)[0] for one in asked]
    assert whole[::-1] == decode_all(target, asked[::-1], 8, NO_STOP, rows=4)
    assert whole[2:4] == decode_all(target, [*asked[2:4], *requests(1.0, seed=1)], 8, NO_STOP, rows=5)[:2]
    assert whole != decode_all(target, requests(1.0, seed=1), 8, NO_STOP)
    assert len({tuple(text) for text in decode_all(target, [Request([1], NEW, 1.0, s) for s in range(9)])}) > 7


def test_logits_do_not_depend_on_companions_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `exact` promises, on rows other than those it was tried with. Keyed by the row's ids."""
    target = tiny_target("llama")
    seen: list[dict[tuple[float, int], torch.Tensor]] = []

    def record(logits: torch.Tensor, temperatures: list[float], uniforms: list[float], top_k: int) -> list[int]:
        for row, key in enumerate(zip(temperatures, uniforms, strict=True)):
            if key[0]:
                seen[-1][key[0], round(key[1] * 2**40)] = logits[row].clone()
        return sample_rows(logits, temperatures, uniforms, top_k)

    monkeypatch.setattr("infer.batched.sample_rows", record)
    asked = [Request(prompt_ids(1 + i % 9, seed=i), 4 + i % 11, 1.0, i) for i in range(30)]
    for rows, order in ((16, list(range(30))), (16, list(range(29, -1, -1))), (16, [0, 7, 29, 3])):
        seen.append({})
        decoder = BatchedDecoder(target, rows, 40, 8, NO_STOP)
        assert decoder.exact

        def program(index: int) -> Program[None]:
            yield asked[index]

        decoder.run(map(program, order), lambda result: None)
    assert len(seen[0]) == sum(one.max_new_tokens for one in asked) == len(seen[1]) > len(seen[2]) > 0
    assert all(torch.equal(seen[0][key], row) for other in seen[1:] for key, row in other.items())


def test_a_target_whose_rows_depend_on_each_other_is_found_out(
    monkeypatch: pytest.MonkeyPatch, kind: type[Passes]
) -> None:
    target = tiny_target("llama")
    forward = target.forward

    @torch.inference_mode()
    def leaky(ids, *args, **kwargs):
        out = forward(ids, *args, **kwargs)
        out.logits_BNV.add_(1e-6 * (out.logits_BNV.mean() + ids.sum()))
        return out

    monkeypatch.setattr(target, "forward", leaky)
    decoder = BatchedDecoder(target, 16, 40, 8, NO_STOP)
    assert type(decoder.passes) is kind and not decoder.exact
    assert run_all(decoder, PROMPTS) == [library_greedy(tiny_model("llama"), prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("bad", "all_from", "sizes"),
    [(range(6), 6, {8, 32, 64}), ([1, 3, 16], 0, {4, 8, 32}), (range(30), 0, {32, 64})],
)
def test_only_sizes_that_are_exact_are_used(
    monkeypatch: pytest.MonkeyPatch, bad: Sequence[int], all_from: int, sizes: set[int]
) -> None:
    """A target that rounds otherwise in passes of some sizes: it is never given such a pass."""
    target = tiny_target("llama")
    own = BatchedDecoder(target, 16, 40, 8, NO_STOP).passes  # this machine's own products may differ in small passes
    assert isinstance(own, PackedPasses)
    sizes = {size for size in sizes if size in own.sizes or 0 < own.least <= size}
    forward, used = target.forward, []

    @torch.inference_mode()
    def rounding(ids, *args, **kwargs):
        out = forward(ids, *args, **kwargs)
        used.append(ids.shape[1])
        if ids.shape[1] in bad:
            out.logits_BNV.mul_(1 + 1e-6)
        return out

    monkeypatch.setattr(target, "forward", rounding)
    decoder = BatchedDecoder(target, 16, 40, 8, NO_STOP)
    assert isinstance(decoder.passes, PackedPasses) and decoder.exact
    least = decoder.passes.least
    assert (all_from <= least <= 8 if all_from else least == 0) and sizes <= set(decoder.passes.sizes)
    assert not set(bad) & set(decoder.passes.sizes)
    used.clear()
    assert run_all(decoder, PROMPTS) == [library_greedy(tiny_model("llama"), prompt, NEW) for prompt in PROMPTS]
    assert not set(used) & set(bad)
    assert min(used) == (max(6, least) if least else min(n for n in decoder.passes.sizes if n >= 6))


def test_packed_passes_are_used_where_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"llama", "mistral", "qwen3_mixed", "gpt2", "gemma2", "gpt_oss"}
    packed = {name for name in names if isinstance(make_passes(tiny_target(ARCHITECTURES[name]), 2, 16), PackedPasses)}
    assert packed == {"llama", "mistral", "qwen3_mixed", "gpt2"}
    target = tiny_target("llama")
    forward = target.forward

    def by_slot(ids, positions, masks, cache, keep=None):  # a target that does not go by the positions it is given
        there = torch.arange(ids.shape[1])[None].expand_as(ids) + cache.length
        return forward(ids, there, masks, cache, keep)

    monkeypatch.setattr(target, "forward", by_slot)
    assert isinstance(make_passes(target, 2, 16), PaddedPasses)


# --- the law --------------------------------------------------------------------------------------------------


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with this many degrees of freedom > statistic)."""
    return 1 - torch.special.gammainc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)).item()


def test_tail_formula() -> None:
    assert chi_square_tail(2.0, 2) == pytest.approx(math.exp(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampled_frequencies(temperature: float) -> None:
    """Chi-square of 40000 draws against softmax over the top 5; false-failure rate 1e-4 per temperature."""
    draws, k = 40_000, 5
    logits = torch.tensor([2.0, 0.3, -1.0, 1.1, 0.0, 0.9, -0.4, 1.6])
    top = logits.topk(k)
    law = (top.values / temperature).softmax(-1)
    uniforms = torch.rand(draws, generator=torch.Generator().manual_seed(7)).tolist()
    token = sample_rows(logits.expand(draws, -1).contiguous(), [temperature] * draws, uniforms, k)
    counts = torch.bincount(torch.tensor(token), minlength=len(logits)).float()
    assert counts[top.indices].sum() == draws  # nothing outside the top k
    expected = law * draws
    statistic = ((counts[top.indices] - expected) ** 2 / expected).sum().item()
    assert chi_square_tail(statistic, k - 1) > 1e-4
    wrong = (top.values / (1.1 * temperature)).softmax(-1) * draws  # the test can tell 10 % of temperature
    assert chi_square_tail(((counts[top.indices] - wrong) ** 2 / wrong).sum().item(), k - 1) < 1e-4


def test_second_tokens_follow_the_law_given_the_first() -> None:
    """Over 3000 rows with seeds of their own, decoded together, against the enumeration of all pairs of the top 3.

    False-failure rate 1e-4. It fails if a row's draws repeat, or follow those of the row before.
    """
    target, prompt, k, count = tiny_target("llama"), PROMPTS[0], 3, 3000
    law: dict[tuple[int, int], float] = {}
    model = tiny_model("llama")
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].topk(k)
        for one, p in zip(first.indices.tolist(), (first.values / 4).softmax(-1).tolist(), strict=True):
            second = model(torch.tensor([[*prompt, one]])).logits[0, -1].topk(k)
            for two, q in zip(second.indices.tolist(), (second.values / 4).softmax(-1).tolist(), strict=True):
                law[one, two] = p * q
    found = decode_all(target, [Request(prompt, 2, 4.0, seed) for seed in range(count)], k, NO_STOP, rows=200)
    pairs = [(one, two) for one, two in found]
    assert set(pairs) <= law.keys()
    statistic = sum((pairs.count(pair) - p * count) ** 2 / (p * count) for pair, p in law.items())
    assert chi_square_tail(statistic, len(law) - 1) > 1e-4
    uniform = count / len(law)
    flat = sum((pairs.count(pair) - uniform) ** 2 / uniform for pair in law)
    assert chi_square_tail(flat, len(law) - 1) < 1e-4  # the test can tell another law


def test_temperatures_are_per_row() -> None:
    logits = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(300, generator=torch.Generator().manual_seed(2)).tolist()
    token = torch.tensor(sample_rows(logits, [0.0, 5.0] * 150, uniforms, 8))
    best = logits.argmax(-1)
    assert torch.equal(token[::2], best[::2])
    assert (token[1::2] != best[1::2]).float().mean() > 0.5
