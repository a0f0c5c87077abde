"""Processing against transformers node by node, the settings, random numbers per row, and draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from infer import sampling
from infer.sampling import (
    PREFIX_FREE,
    ForcedTokensProcessor,
    PresencePenaltyProcessor,
    Processing,
    RowRandom,
    build_processors,
    draw,
    draw_in_turn,
    draw_without_replacement,
    softmax_of,
)

VOCAB = 12
PROMPT = 4


class AddInPlace(hf.LogitsProcessor):
    """Writes into the scores that it was given, as processors may, by the prefix's last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores += input_ids[:, -1:]
        return scores


MAKERS: dict[str, Callable[[], list[hf.LogitsProcessor]]] = {
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.6)],
    "top_k": lambda: [hf.TopKLogitsWarper(3)],
    "top_p": lambda: [hf.TopPLogitsWarper(0.7)],
    "top_h": lambda: [hf.TopHLogitsWarper(0.6)],
    "min_p": lambda: [hf.MinPLogitsWarper(0.2)],
    "typical": lambda: [hf.TypicalLogitsWarper(0.8)],
    "epsilon": lambda: [hf.EpsilonLogitsWarper(0.05)],
    "eta": lambda: [hf.EtaLogitsWarper(0.1)],
    "suppress": lambda: [hf.SuppressTokensLogitsProcessor([1, 5])],
    "remove_nan": lambda: [hf.InfNanRemoveLogitsProcessor()],
    "normalise": lambda: [hf.LogitNormalization()],
    "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.4)],
    "ngram": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
    "bad_words": lambda: [hf.NoBadWordsLogitsProcessor([[3], [1, 2], [4, 0, 7]])],
    "bias": lambda: [hf.SequenceBiasLogitsProcessor([[[1], 2.0], [[2, 3], -4.0]])],
    "min_length": lambda: [hf.MinLengthLogitsProcessor(PROMPT + 2, [0])],
    "min_new": lambda: [hf.MinNewTokensLengthLogitsProcessor(PROMPT, 3, [0, 2])],
    "decay": lambda: [hf.ExponentialDecayLengthPenalty((1, 1.5), [0], PROMPT)],
    "forced_eos": lambda: [hf.ForcedEOSTokenLogitsProcessor(PROMPT + 3, 2)],
    "begin": lambda: [hf.SuppressTokensAtBeginLogitsProcessor([1, 2, 3], PROMPT + 1)],
    "presence": lambda: [PresencePenaltyProcessor(0.8, PROMPT)],
    "forced": lambda: [ForcedTokensProcessor({1: 7, 3: 2}, PROMPT)],
    "in_place": lambda: [AddInPlace()],
    "mixed": lambda: [
        hf.TemperatureLogitsWarper(0.8),
        hf.RepetitionPenaltyLogitsProcessor(1.4),
        PresencePenaltyProcessor(-0.5, PROMPT),
        hf.TopKLogitsWarper(8),
        hf.TopPLogitsWarper(0.9),
        AddInPlace(),
        hf.LogitNormalization(),
    ],
}


def random_case(seed: int, rows: int, lines: int, depth: int) -> tuple[list[list[int]], Tensor, list[int], Tensor]:
    """Prefixes of different lengths, logits of tree nodes, their batch rows in any order, their paths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(PROMPT, PROMPT + 4, (rows,), generator=generator).tolist()
    prefixes = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    row_R = torch.randint(rows, (lines,), generator=generator).tolist()
    logits_RV = 2 * torch.randn(lines, VOCAB, generator=generator)
    return prefixes, logits_RV, row_R, torch.randint(VOCAB, (lines, depth), generator=generator)


def alone(processors: Any, prefixes: list[list[int]], logits_RV: Tensor, row_R: list[int], path_RD: Tensor) -> Tensor:
    """Each line by itself, with its whole prefix."""
    lines = []
    for line, row in enumerate(row_R):
        ids = torch.tensor([[*prefixes[row], *path_RD[line].tolist()]])
        scores = logits_RV[line : line + 1].float().clone()
        lines.append(scores if processors[row] is None else processors[row](ids, scores))
    return torch.cat(lines)


@pytest.mark.parametrize("shared", [True, False], ids=["one_list", "list_per_row"])
@pytest.mark.parametrize("name", MAKERS)
def test_scores_equal_each_node_alone(name: str, shared: bool) -> None:
    for depth, dtype in itertools.product((0, 1, 3), (torch.float32, torch.bfloat16)):
        prefixes, logits_RV, row_R, path_RD = random_case(depth, rows=3, lines=11, depth=depth)
        logits_RV = logits_RV.to(dtype)
        one = hf.LogitsProcessorList(MAKERS[name]())
        processors = [one] * 3 if shared else [hf.LogitsProcessorList(MAKERS[name]()), None, one]
        given = logits_RV.clone()
        processing = Processing(processors, prefixes)
        scores_RV = processing.scores(logits_RV, row_R, path_RD)
        want_RV = alone(processors, prefixes, logits_RV, row_R, path_RD)
        # The same fp32 operations on other shapes: vectorised kernels may round the last bit differently.
        torch.testing.assert_close(scores_RV, want_RV, rtol=1e-6, atol=1e-6)
        assert scores_RV.dtype == torch.float32 and torch.equal(logits_RV, given)
        want_p = softmax_of(want_RV)
        torch.testing.assert_close(
            softmax_of(processing.scores(logits_RV, row_R, path_RD)), want_p, rtol=1e-5, atol=1e-7
        )
        if depth == 0:
            torch.testing.assert_close(processing.scores(logits_RV, row_R), want_RV, rtol=1e-6, atol=1e-6)


def test_prefix_free_processors_run_once_for_all_rows() -> None:
    calls: list[tuple[int, int]] = []

    class Spy(hf.LogitsProcessorList):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            calls.append((len(scores), input_ids.shape[1]))
            return super().__call__(input_ids, scores, **kwargs)

    for name, expected in (("top_k", [(5, 0)]), ("repetition", [(2, 6), (3, 5)])):
        processing = Processing([hf.LogitsProcessorList(MAKERS[name]())] * 2, [[1] * 5, [2] * 4])
        processing._runs = [[(Spy(run), reads) for run, reads in runs] for runs in processing._runs]
        calls.clear()
        processing.scores(torch.randn(5, VOCAB), [0, 0, 1, 1, 1], torch.zeros(5, 1, dtype=torch.long))
        assert calls == expected


def test_prefix_free_processors_do_not_look_at_ids() -> None:
    """The set is right: two very different prefixes give the same scores. And what reads them is not in it."""
    for name, make in MAKERS.items():
        (processor, *more) = make()
        scores_RV = 2 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
        if not more and type(processor) in PREFIX_FREE:
            nothing = processor(torch.empty(4, 0, dtype=torch.long), scores_RV.clone())
            some = processor(torch.randint(VOCAB, (4, 9)), scores_RV.clone())
            assert torch.equal(nothing, some), name
    assert {type(MAKERS[name]()[0]) for name in list(MAKERS)[:11]} == PREFIX_FREE

    class Subclass(hf.TemperatureLogitsWarper):  # may read them
        pass

    processing = Processing([hf.LogitsProcessorList([Subclass(0.5)])], [[1, 2]])
    assert processing._prefixes[0].ids().tolist() == [1, 2]


def test_append_and_keep_rows() -> None:
    prefixes, logits_RV, _, path_RD = random_case(3, rows=3, lines=3, depth=2)
    processors = [hf.LogitsProcessorList(MAKERS[name]()) for name in ("repetition", "mixed", "ngram")]
    processing = Processing(processors, prefixes)
    for step in range(200):
        for row in range(3):
            new = [(7 * step + row) % VOCAB] * (step % 3)
            processing.append(row, new)
            prefixes[row] = prefixes[row] + new
    assert [processing._prefixes[row].ids().tolist() for row in range(3)] == prefixes
    processing.keep_rows([2, 0])
    processors, prefixes = [processors[2], processors[0]], [prefixes[2], prefixes[0]]
    processing.append(1, [5])
    prefixes[1] = [*prefixes[1], 5]
    want = alone(processors, prefixes, logits_RV, [0, 1, 0], path_RD)
    torch.testing.assert_close(processing.scores(logits_RV, [0, 1, 0], path_RD), want, rtol=1e-6, atol=1e-6)


def test_appending_does_not_copy_the_whole_prefix() -> None:
    processing = Processing([hf.LogitsProcessorList(MAKERS["repetition"]())], [[1] * 1000])
    places = set()
    for token in range(3000):
        processing.append(0, [token])
        places.add(processing._prefixes[0].ids().data_ptr())
    assert len(places) <= 3 and processing._prefixes[0].ids()[1000:].tolist() == list(range(3000))


def test_plain_processing_is_the_logits() -> None:
    for processors in ([None, None], [hf.LogitsProcessorList(), None]):
        processing = Processing(processors, [[1], [2, 3]])
        assert processing.plain
        processing.append(0, [4])
        logits_RV = torch.randn(3, VOCAB)
        assert torch.equal(processing.scores(logits_RV, [0, 1, 1]), logits_RV)
        assert processing.scores(logits_RV.bfloat16(), [0, 1, 1]).dtype == torch.float32
    assert not Processing([None, hf.LogitsProcessorList(MAKERS["top_k"]())], [[1], [2]]).plain
    with pytest.raises(ValueError, match="1 processor lists for 2 prefixes"):
        Processing([None], [[1], [2]])


def test_a_row_without_tokens_has_no_probability() -> None:
    scores = torch.tensor([[-torch.inf] * 3, [0.0, -torch.inf, 0.0], [0.0, torch.nan, 0.0]])
    p = softmax_of(scores)
    assert p[:2].tolist() == [[0, 0, 0], [0.5, 0, 0.5]] and p[2].isnan().all()
    assert draw(p, torch.full((3,), 0.9)).tolist() == [-1, 2, -1]


# ---------------------------------------------------------------- settings

ALL_SETTINGS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 6,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "bad_words": [[3], [1, 2]],
    "suppress": [8],
    "forced_ids": {2: 5},
    "min_new_tokens": 4,
    "eos_ids": [0, 9],
    "prompt_length": PROMPT,
}


def test_build_orders_them_as_generate() -> None:
    names = [type(processor).__name__ for processor in build_processors(**ALL_SETTINGS)]
    assert names == [
        "RepetitionPenaltyLogitsProcessor",
        "PresencePenaltyProcessor",
        "NoBadWordsLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "ForcedTokensProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]
    greedy = build_processors(**{**ALL_SETTINGS, "do_sample": False})
    assert [type(processor).__name__ for processor in greedy] == names[:6]


def test_build_equals_what_generate_builds() -> None:
    """The same classes with the same state, in the same order, for all that transformers has."""
    from transformers import GenerationConfig

    from tests.tiny import tiny_model

    settings = {key: ALL_SETTINGS[key] for key in ("do_sample", "temperature", "top_k", "top_p", "min_p")}
    settings |= {"repetition_penalty": 1.3, "min_new_tokens": 4}
    config = GenerationConfig(**settings, bad_words_ids=[[3], [1, 2], [9]], suppress_tokens=[8], eos_token_id=[0, 9])
    model = tiny_model("llama")
    model._prepare_special_tokens(config)
    theirs = model._get_logits_processor(config, input_ids_seq_length=PROMPT, device="cpu")
    ours = build_processors(
        **settings, bad_words=[[3], [1, 2], [9]], suppress=[8], eos_ids=[0, 9], prompt_length=PROMPT
    )

    def state(processor: Any) -> dict[str, Any]:
        found = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(processor).items()}
        found.pop("bad_word_ids", None)  # as given; ours are without the EOS, as sequence_bias is in both
        return found

    assert [(type(p), state(p)) for p in ours] == [(type(p), state(p)) for p in theirs]


def test_neutral_settings_build_nothing() -> None:
    assert len(build_processors(do_sample=True)) == 0
    assert len(build_processors(do_sample=False, temperature=0.5, top_k=3)) == 0
    assert len(build_processors(do_sample=True, min_new_tokens=3, prompt_length=1)) == 0  # no EOS to hold back
    assert len(build_processors(do_sample=True, bad_words=[[7]], eos_ids=[7])) == 0


def test_every_setting_reaches_every_node() -> None:
    prefixes, logits_RV, row_R, path_RD = random_case(4, rows=2, lines=9, depth=2)
    prefixes = [prefix[:PROMPT] for prefix in prefixes]  # the nodes choose the new token 2: the forced one
    processors = [build_processors(**ALL_SETTINGS), build_processors(**{**ALL_SETTINGS, "forced_ids": None})]
    scores_RV = Processing(processors, prefixes).scores(logits_RV, row_R, path_RD)
    torch.testing.assert_close(scores_RV, alone(processors, prefixes, logits_RV, row_R, path_RD), rtol=1e-6, atol=1e-6)
    for line, row in enumerate(row_R):
        possible = [t for t, score in enumerate(scores_RV[line].tolist()) if score > -math.inf]
        assert possible == [5] if row == 0 else not {0, 3, 8, 9} & set(possible)


def test_presence_penalty_counts_new_tokens_once() -> None:
    ids = torch.tensor([[1, 1, 2, 3, 3], [1, 1, 4, 4, VOCAB + 3]])  # an id that the LM head does not have
    scores = PresencePenaltyProcessor(0.5, 2)(ids, torch.zeros(2, VOCAB))
    assert scores[0, [1, 2, 3, 4]].tolist() == [0, -0.5, -0.5, 0] and scores[1, [1, 2, 4]].tolist() == [0, 0, -0.5]
    assert PresencePenaltyProcessor(0.5, 5)(ids, torch.zeros(2, VOCAB)).eq(0).all()


def test_forced_tokens_win_at_their_place_only() -> None:
    scores = torch.randn(2, VOCAB)
    processor = ForcedTokensProcessor({0: 7, 2: 3}, PROMPT)
    for new, token in ((0, 7), (1, None), (2, 3), (3, None)):
        forced = processor(torch.zeros(2, PROMPT + new, dtype=torch.long), scores)
        assert torch.equal(forced, scores) if token is None else softmax_of(forced)[:, token].eq(1).all()
    with pytest.raises(ValueError, match=r"forced_ids has token 12, expected one below 12"):
        ForcedTokensProcessor({0: VOCAB}, 1)(torch.zeros(1, 1, dtype=torch.long), scores)


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("temperature", 0.0, "above 0"),
        ("temperature", math.nan, "above 0"),
        ("temperature", math.inf, "above 0"),
        ("top_k", -1, "a whole number"),
        ("top_k", 2.5, "a whole number"),
        ("top_p", 0.0, "above 0, at most 1"),
        ("top_p", 1.1, "above 0, at most 1"),
        ("min_p", -0.1, "from 0"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", math.inf, "above 0"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("bad_words", [[]], "non-empty lists"),
        ("bad_words", [[-1]], "non-empty lists"),
        ("suppress", [-3], "token ids"),
        ("forced_ids", {-1: 4}, "place: token id"),
        ("forced_ids", {1: -4}, "place: token id"),
        ("min_new_tokens", -1, "0 (off) or more"),
        ("eos_ids", [-1], "token ids"),
        ("prompt_length", -1, "0 or more"),
    ],
)
def test_bad_settings_are_refused(setting: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        build_processors(**{"do_sample": True, "prompt_length": 1, setting: value})
    message = str(caught.value)
    assert message.startswith(f"{setting} is {value!r}, expected ") and message.endswith(f": change {setting}")
    assert expected in message


@pytest.mark.parametrize("setting", [{"presence_penalty": 0.5}, {"forced_ids": {0: 1}}, {"min_new_tokens": 2}])
def test_settings_that_need_the_prompt_length_say_so(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"prompt_length is None, .*{next(iter(setting))}"):
        build_processors(do_sample=True, **setting)


# ---------------------------------------------------------------- random numbers per row


def test_a_row_depends_on_its_seed_alone() -> None:
    def numbers(random: RowRandom, row: int) -> list[Any]:
        drawn = [random.uniform(3)[row], random.noise((2, 5))[row], random.uniform(4)[row]]
        return [x.tolist() for x in drawn]

    together = [numbers(RowRandom([11, 12, 13]), row) for row in range(3)]
    assert together == [numbers(RowRandom([seed]), 0) for seed in (11, 12, 13)]
    assert together[0] != together[1]
    assert RowRandom([4, 4]).uniform(6).unique().numel() == 6  # the same seed, the same numbers


def test_keep_rows_goes_on_with_each_stream() -> None:
    random, whole = RowRandom([1, 2, 3]), RowRandom([1, 2, 3])
    random.uniform(5), whole.uniform(5)
    random.keep_rows([2, 0])
    assert torch.equal(random.uniform(7), whole.uniform(7)[[2, 0]])
    random.keep_rows([])
    assert random.uniform(3).shape == (0, 3) and random.noise((2, 4)).shape == (0, 2, 4)


def test_uniforms_are_strictly_inside_and_fine() -> None:
    random = RowRandom([0])
    uniform, noise = random.uniform(10**6), random.noise((10**6,))
    assert uniform.dtype == torch.float64 and noise.dtype == torch.float32
    for drawn in (uniform, noise):
        assert drawn.min() > 0 and drawn.max() < 1 and abs(drawn.double().mean() - 0.5) < 0.002  # 7 standard errors
    small = noise[noise < 1e-3]
    assert len(small) > 500 and (small * 2**24 % 1 != 0).double().mean() > 0.9  # not on a grid of 2^-24


# ---------------------------------------------------------------- draws


def test_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    p_RV = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, -1)
    u_R = torch.tensor([1e-18, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(p_RV, u_R).tolist() == [1, 1, 3, 3, 4, 4]
    assert draw(3 * p_RV, u_R).tolist() == [1, 1, 3, 3, 4, 4]  # not normalised
    assert draw(p_RV, torch.ones(6)).tolist() == [4] * 6  # even where rounding makes it 1


def test_draw_never_takes_probability_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    p_RV = torch.rand(20_000, 50, generator=generator)
    p_RV = p_RV.where(torch.rand(p_RV.shape, generator=generator) < 0.1, 0.0)
    p_RV[:, 17] = 1e-30  # lost in every sum, yet the only one of some rows
    ends = torch.tensor([2.0**-54, 1 - 2.0**-53, 0.5, 0.3], dtype=torch.float64).repeat(5000)
    token_R = draw(p_RV, ends)
    assert p_RV.gather(1, token_R[:, None]).gt(0).all()
    assert draw(torch.zeros(1, 4), torch.tensor([0.5])).tolist() == [-1]


def g_test(count: Tensor, expected: Tensor) -> float:
    g = 2 * torch.special.xlogy(count, count / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(count) - 1) / 2, dtype=torch.float64), g / 2))


@pytest.mark.parametrize("method", ["race", "in_turn"])
def test_draws_without_replacement_have_the_sequential_law(method: str) -> None:
    """All ordered triples of 5 tokens, 200,000 draws; each G-test fails falsely with chance 1e-4, the seed is fixed."""
    rows, k = 200_000, 3
    q = torch.tensor([0.05, 0.3, 0.1, 0.4, 0.15])
    if method == "race":
        random = torch.rand(rows, 5, generator=torch.Generator().manual_seed(1))
        token_RK = draw_without_replacement(q.expand(rows, 5), k, random)
    else:
        token_RK = draw_in_turn(q.expand(rows, 5), RowRandom([2]).uniform(rows * k).view(rows, k))
    triples = list(itertools.permutations(range(5), k))
    w = q.double().tolist()
    law = [w[a] * w[b] / (1 - w[a]) * w[c] / (1 - w[a] - w[b]) for a, b, c in triples]
    cell = {triple: place for place, triple in enumerate(triples)}
    code_R = token_RK[:, 0] * 25 + token_RK[:, 1] * 5 + token_RK[:, 2]
    count = torch.zeros(len(triples), dtype=torch.float64)
    for code, seen in enumerate(torch.bincount(code_R, minlength=125).tolist()):
        if seen:  # a KeyError here is a repeated token
            count[cell[code // 25, code // 5 % 5, code % 5]] = seen
    assert g_test(count, rows * torch.tensor(law, dtype=torch.float64)) > 1e-4


def test_draw_noise_near_zero_lets_no_impossible_token_win() -> None:
    q_RV = torch.tensor([[1.0, 0.0, 1e-44, 0.0]]).expand(3, -1)  # and no possible one is lost by underflow
    noise_RV = torch.tensor([[0.9, 0.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 2.0**-54, 0.0]])
    token_RK = draw_without_replacement(q_RV, 2, noise_RV)
    assert token_RK.tolist() == [[0, 2]] * 3


def test_surplus_children_have_no_q() -> None:
    q_RV = torch.tensor([[0.0, 0.7, 0.0, 0.3], [0.0, 0.0, 0.0, 0.0], [torch.nan] * 4])
    race = draw_without_replacement(q_RV, 4, RowRandom([1]).noise((3, 4))[0])
    turn = draw_in_turn(q_RV, RowRandom([1]).uniform(12).view(3, 4))
    for token_RK in (race, turn):
        assert token_RK.shape == (3, 4) and set(token_RK[0, :2].tolist()) == {1, 3}
        assert token_RK.min() >= 0 and token_RK.max() < 4  # all can be embedded
    assert set(race[0].tolist()) == {0, 1, 2, 3} and turn[0, 2:].tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"k is 5, expected 1 \.\. 4"):
        draw_without_replacement(q_RV, 5, torch.rand(3, 4))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("keep", [1, 3])
def test_a_nucleus_without_sorting_is_the_librarys(top_p: float, keep: int) -> None:
    """Same tokens kept, but for one whose place in the sum is within rounding of top_p; None where it is too large."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.tensor([0.0, 1.0, 3.0, 10.0, 1000.0])[:, None]
    scores = torch.randn(5, 8192, generator=generator) * scale
    scores[3, ::3] = -torch.inf
    warper = hf.TopPLogitsWarper(top_p, min_tokens_to_keep=keep)
    ids = torch.empty(5, 0, dtype=torch.long)
    if top_p > 0.2:
        assert sampling._nucleus(warper, scores[:1]) is None  # uniform over 8192 tokens
    rows = [row for row in range(1, 5) if sampling._nucleus(warper, scores[row : row + 1]) is not None]
    assert rows and (top_p < 0.99) <= (rows == [1, 2, 3, 4] or top_p > 0.4)
    for row in rows:
        given = scores[row : row + 1].clone()
        got, want = sampling._nucleus(warper, given), warper(ids[:1], scores[row : row + 1])
        assert got is not None and torch.equal(given, scores[row : row + 1])
        order = scores[row].double().softmax(-1).sort(descending=True)
        before = (order.values.cumsum(-1) - order.values)[order.indices.argsort()]
        differs = (got != want)[0]
        assert bool(((before[differs] - top_p).abs() < 1e-5).all()) and int(differs.sum()) <= 1
