"""From logits to probabilities and draws: one code path for the target's p and the draft's q.

Shapes: B batch rows · R result rows (tree nodes; many may belong to one batch row) · V vocabulary · D tokens below the
root on the path of a node · K children of a node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from heads.topk import top_k_of

# These do not look at input_ids. Exact classes: a subclass may look.
PREFIX_FREE: frozenset[type] = frozenset(
    {
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TopHLogitsWarper,
        MinPLogitsWarper,
        TypicalLogitsWarper,
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        SuppressTokensLogitsProcessor,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
    }
)

_Key = TypeVar("_Key", int, "int | None")

_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1
_ABOVE_ZERO = 2.0**-54  # half of the step of a float64 uniform


def softmax_of(scores_RV: Tensor) -> Tensor:
    """fp32 softmax, [R, V]. A row that is all -inf has no distribution and gives zeros; NaN stays NaN."""
    scores_RV = scores_RV.float()
    nothing_R1 = scores_RV.amax(-1, keepdim=True) == -math.inf
    return scores_RV.softmax(-1).masked_fill_(nothing_R1, 0.0)


class Processing:
    """Applies each batch row's transformers processors to scores of tree nodes, each node with its own prefix.

    The prefix of a node is that of its batch row (all decided tokens, the root included), then the tokens below the
    root on the node's path. p and q both come from here, so they cannot differ in a setting.

    Processors see all nodes of one batch row in one call, one line per node, so they must treat lines alike and keep
    no state between calls. What needs the index of a prompt in the batch (PrefixConstrainedLogitsProcessor) or
    sequences in order (watermarks with state) does not qualify. A list must not change after it was given.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessorList | None],
        prefixes: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        if len(processors) != len(prefixes):
            raise ValueError(
                f"{len(processors)} processor lists for {len(prefixes)} prefixes, expected one of each per batch row: "
                "change processors (None: no processing)"
            )
        self._runs: list[list[tuple[LogitsProcessorList, bool]]] = []  # per distinct list
        self._list_of_row: list[int | None] = []  # index into _runs; None: nothing to do
        known: dict[int, int] = {}
        for chosen in processors:
            if not chosen:
                self._list_of_row.append(None)
                continue
            if id(chosen) not in known:
                known[id(chosen)] = len(self._runs)
                self._runs.append(_split(chosen))
            self._list_of_row.append(known[id(chosen)])
        self._prefixes = [
            _Prefix(ids if which is not None and any(reads for _, reads in self._runs[which]) else None, device)
            for which, ids in zip(self._list_of_row, prefixes, strict=True)
        ]

    @property
    def plain(self) -> bool:
        """Nothing to do: scores are the logits."""
        return all(which is None for which in self._list_of_row)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Extends a batch row's prefix by decided tokens."""
        self._prefixes[row].extend(tokens)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps only these batch rows, in this order."""
        self._list_of_row = [self._list_of_row[row] for row in rows]
        self._prefixes = [self._prefixes[row] for row in rows]

    def scores(self, logits_RV: Tensor, row_R: Sequence[int], path_RD: Tensor | None = None) -> Tensor:
        """Processed scores, [R, V] fp32.

        Args:
            logits_RV: never modified; without processors an fp32 input is returned as it is.
            row_R: batch row of each line; where lines of one row follow each other, nothing is copied to find them.
            path_RD: int64, tokens below the root on each line's path (the same D for all; None: none).
        """
        assert len(row_R) == len(logits_RV), f"{len(row_R)} rows for {len(logits_RV)} lines of logits"
        assert path_RD is None or len(path_RD) == len(row_R), f"{len(row_R)} rows for {len(path_RD or ())} paths"
        if self.plain:
            return logits_RV.float()
        scores_RV = logits_RV.to(torch.float32, copy=True)  # a processor may write in place
        for which, lines in _group([self._list_of_row[row] for row in row_R]).items():
            if which is None:
                continue
            at = _index(lines, len(row_R), scores_RV.device)
            part = scores_RV if at is None else scores_RV[at]
            for processors, reads in self._runs[which]:
                if reads:
                    part = self._with_prefixes(processors, part, [row_R[line] for line in lines], path_RD, at)
                else:
                    part = _apply(processors, torch.empty(len(lines), 0, dtype=torch.long, device=part.device), part)
            if at is None:
                scores_RV = part.float()
            else:
                scores_RV[at] = part.float()
        return scores_RV

    def _with_prefixes(
        self,
        processors: LogitsProcessorList,
        part_SV: Tensor,
        row_S: Sequence[int],
        path_RD: Tensor | None,
        at: slice | Tensor | None,
    ) -> Tensor:
        """`processors` on S lines, batch row by batch row; `at` are the lines' places in path_RD (None: all)."""
        path_SD = path_RD if path_RD is None or at is None else path_RD[at]
        result_SV = torch.empty_like(part_SV)
        for row, lines in _group(row_S).items():
            index = _index(lines, len(row_S), part_SV.device)
            inside = slice(None) if index is None else index
            ids = self._prefixes[row].ids().expand(len(lines), -1)
            ids = ids.contiguous() if path_SD is None else torch.cat([ids, path_SD[inside]], 1)
            result_SV[inside] = _apply(processors, ids, part_SV[inside])
        return result_SV


def _split(processors: LogitsProcessorList) -> list[tuple[LogitsProcessorList, bool]]:
    """Runs of neighbours that all read the prefix (True) or all do not (False), in order."""
    runs: list[tuple[LogitsProcessorList, bool]] = []
    for processor in processors:
        reads = type(processor) not in PREFIX_FREE
        if not runs or runs[-1][1] != reads:
            runs.append((LogitsProcessorList(), reads))
        runs[-1][0].append(processor)
    return runs


def _apply(processors: Any, ids_RL: Tensor, scores_RV: Tensor) -> Tensor:
    if not any(type(processor) is TopPLogitsWarper for processor in processors):
        return processors(ids_RL, scores_RV)
    for processor in processors:
        fast = _nucleus(processor, scores_RV) if type(processor) is TopPLogitsWarper else None
        scores_RV = processor(ids_RL, scores_RV) if fast is None else fast
    return scores_RV


_NUCLEUS = 1024  # tokens: a larger nucleus is left to the library


def _nucleus(warper: TopPLogitsWarper, scores_RV: Tensor) -> Tensor | None:
    """What the library's top-p makes of the scores, without sorting the vocabulary; None: use the library's.

    It removes a token if it and all less likely ones weigh at most 1 - top_p together, which is: if the likelier ones
    alone weigh top_p or more. So only the most likely tokens need to be in order. (A CPU sorts 49k scores in 5 ms.) Of
    equal scores at the edge, which ones stay is arbitrary in both.
    """
    if scores_RV.device.type != "cpu" or scores_RV.shape[1] < 4 * _NUCLEUS or not 0 < warper.top_p < 1:
        return None
    value_RK, index_RK = top_k_of(scores_RV.contiguous(), _NUCLEUS)
    chance_RK = (value_RK - scores_RV.logsumexp(-1, keepdim=True)).exp()
    before_RK = chance_RK.cumsum(-1) - chance_RK
    if not bool((before_RK[:, -1] >= warper.top_p).all()):  # also where a row is NaN or has nothing
        return None
    kept_RK = before_RK < warper.top_p
    kept_RK[:, : warper.min_tokens_to_keep] = True
    removed_RK = value_RK.masked_fill(~kept_RK, warper.filter_value)
    return torch.full_like(scores_RV, warper.filter_value).scatter_(1, index_RK, removed_RK)


def _group(keys: Sequence[_Key]) -> dict[_Key, list[int]]:
    """Places of each key, keys in order of appearance."""
    places: dict[_Key, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def _index(lines: list[int], count: int, device: torch.device) -> slice | Tensor | None:
    """Ascending lines as an index: None for all of them, a slice where they are neighbours, else a tensor."""
    if len(lines) == count:
        return None
    if lines[-1] - lines[0] == len(lines) - 1:
        return slice(lines[0], lines[-1] + 1)
    return torch.tensor(lines, device=device)


class _Prefix:
    """Token ids on the device in a buffer that doubles, so that appending never copies the whole. None: not kept."""

    def __init__(self, ids: Sequence[int] | None, device: torch.device | str) -> None:
        self._kept = ids is not None
        self._buffer = torch.tensor(list(ids or ()), dtype=torch.long, device=device)
        self._length = len(self._buffer)

    def ids(self) -> Tensor:
        assert self._kept, "this row's processors were said not to read prefixes"
        return self._buffer[: self._length]

    def extend(self, tokens: Sequence[int]) -> None:
        if not self._kept or not tokens:
            return
        end = self._length + len(tokens)
        if end > len(self._buffer):
            larger = self._buffer.new_empty(max(2 * len(self._buffer), end, 64))
            larger[: self._length] = self.ids()
            self._buffer = larger
        self._buffer[self._length : end] = torch.tensor(list(tokens), dtype=torch.long)
        self._length = end


class PresencePenaltyProcessor(LogitsProcessor):
    """Subtracts `penalty` once from every token that occurs among the new tokens, those after the prompt.

    score[t] - penalty * [t occurs in ids[prompt_length:]]; the presence penalty of OpenAI's API, which leaves the
    prompt out.
    """

    def __init__(self, penalty: float, prompt_length: int) -> None:
        self.penalty, self.prompt_length = penalty, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        vocab = scores.shape[-1]
        new = input_ids[:, self.prompt_length :].clamp(max=vocab)  # ids that only the embedding has: spare column
        seen = torch.zeros(len(scores), vocab + 1, dtype=torch.bool, device=scores.device).scatter_(1, new, True)
        return torch.where(seen[:, :vocab], scores - self.penalty, scores)


class ForcedTokensProcessor(LogitsProcessor):
    """Forces tokens at given places among the new tokens: score 0 for the forced one, -inf for all others."""

    def __init__(self, token_at: Mapping[int, int], prompt_length: int) -> None:
        self.token_at, self.prompt_length = dict(token_at), prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.token_at.get(input_ids.shape[1] - self.prompt_length)
        if token is None:
            return scores
        if token >= scores.shape[-1]:
            raise ValueError(f"forced_ids has token {token}, expected one below {scores.shape[-1]}: change forced_ids")
        forced = torch.full_like(scores, -math.inf)
        forced[:, token] = 0.0
        return forced


def build_processors(
    *,
    do_sample: bool,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    bad_words: Sequence[Sequence[int]] = (),
    suppress: Sequence[int] = (),
    forced_ids: Mapping[int, int] | None = None,
    min_new_tokens: int = 0,
    eos_ids: Sequence[int] = (),
    prompt_length: int | None = None,
    device: torch.device | str = "cpu",
) -> LogitsProcessorList:
    """The processors of one batch row, in the order of transformers' `generate`; empty if nothing is set.

    repetition penalty, presence penalty, bad words, minimum length, suppressed, forced, then the warpers: temperature,
    top-k, top-p, min-p. The warpers are left out where do_sample is false, as in `generate`. Forced tokens come after
    all that could rule them out. As in `generate` a bad word that is one EOS id alone is dropped (suppress it
    instead), and without eos_ids min_new_tokens does nothing.

    Rows that share one list are processed together where it does not read prefixes: build it once for them.

    Args:
        top_k, min_p: 0 is off. top_p, temperature, repetition_penalty: 1 is off. presence_penalty: 0 is off.
        bad_words: token sequences never completed.
        forced_ids: {place among the new tokens, from 0: token}.
        prompt_length: tokens of the prompt; needed for the presence penalty, forced_ids and min_new_tokens.

    Raises:
        ValueError: a value out of range; prompt_length missing.
    """
    eos = sorted(set(eos_ids))
    words = [list(word) for word in bad_words]
    forced = dict(forced_ids or {})
    _expect(0 < temperature < math.inf, "temperature", temperature, "above 0 (greedy: do_sample=False)")
    _expect(top_k == int(top_k) and top_k >= 0, "top_k", top_k, "a whole number, 0 (off) or more")
    _expect(0 < top_p <= 1, "top_p", top_p, "above 0, at most 1 (off)")
    _expect(0 <= min_p <= 1, "min_p", min_p, "from 0 (off) to 1")
    _expect(0 < repetition_penalty < math.inf, "repetition_penalty", repetition_penalty, "above 0 (1: off)")
    _expect(-2 <= presence_penalty <= 2, "presence_penalty", presence_penalty, "from -2 to 2 (0: off)")
    _expect(min_new_tokens >= 0, "min_new_tokens", min_new_tokens, "0 (off) or more")
    _expect(prompt_length is None or prompt_length >= 0, "prompt_length", prompt_length, "0 or more")
    _expect(all(word and min(word) >= 0 for word in words), "bad_words", words, "non-empty lists of token ids")
    _expect(all(token >= 0 for token in suppress), "suppress", list(suppress), "token ids")
    _expect(all(place >= 0 <= token for place, token in forced.items()), "forced_ids", forced, "{place: token id}")
    _expect(all(token >= 0 for token in eos), "eos_ids", eos, "token ids")
    if prompt_length is None:
        wants = [presence_penalty and "presence_penalty", forced and "forced_ids", min_new_tokens and "min_new_tokens"]
        _expect(not any(wants), "prompt_length", None, f"the prompt's length, for {[w for w in wants if w]}")
        prompt_length = 0

    chosen: list[LogitsProcessor] = []
    if repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if presence_penalty:
        chosen.append(PresencePenaltyProcessor(presence_penalty, prompt_length))
    if words := [word for word in words if word not in [[token] for token in eos]]:
        chosen.append(NoBadWordsLogitsProcessor(words))
    if min_new_tokens and eos:
        on = str(device)  # its EOS ids live there
        chosen.append(MinNewTokensLengthLogitsProcessor(prompt_length, min_new_tokens, eos, device=on))
    if suppress:
        chosen.append(SuppressTokensLogitsProcessor(suppress, device=str(device)))
    if forced:
        chosen.append(ForcedTokensProcessor(forced, prompt_length))
    return LogitsProcessorList([*chosen, *(_warpers(temperature, int(top_k), top_p, min_p) if do_sample else [])])


def _warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = []
    if temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers


def _expect(right: bool, name: str, value: object, expected: str) -> None:
    if not right:
        raise ValueError(f"{name} is {value!r}, expected {expected}: change {name}")


class RowRandom:
    """Random numbers per batch row, each row from a generator of its own: what a row gets depends on its seed alone.

    To keep a row's text independent of its neighbours, ask for the same counts in every round whatever the batch.
    Generators are on the CPU (the same numbers for every device); torch takes a seed modulo 2^32.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._device = torch.device(device)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order; their streams go on."""
        self._generators = [self._generators[row] for row in rows]

    def uniform(self, count: int) -> Tensor:
        """[B, count] float64 on the device, strictly between 0 and 1."""
        return self._draw(count).to(self._device)

    def noise(self, shape: Sequence[int]) -> Tensor:
        """[B, *shape] float32 on the device, strictly between 0 and 1.

        Rounded from float64, so that small values are not on a grid: with torch's own float32 uniforms one token in
        2^24 gets noise 0, which would make it win a race against any probability.
        """
        drawn = self._draw(math.prod(shape)).float().clamp_(max=_BELOW_ONE)
        return drawn.view(len(self._generators), *shape).to(self._device)

    def _draw(self, count: int) -> Tensor:
        drawn = torch.empty(len(self._generators), count, dtype=torch.float64)
        for row, generator in enumerate(self._generators):
            drawn[row].uniform_(generator=generator)
        return drawn.clamp_(min=_ABOVE_ZERO)


def draw(p_RV: Tensor, u_R: Tensor) -> Tensor:
    """One token per line by the inverse of the cumulative distribution, [R] int64.

        token = the first t with p[t] > 0 and p[0] + .. + p[t] > u * sum(p)

    p_RV need not be normalised; sums are float64. A token of probability 0 is never drawn, and where rounding leaves
    no t, the last with p > 0 is taken. -1 where no p is above 0 (all zero, or NaN). No host sync.
    """
    possible_RV = p_RV > 0
    cumulative_RV = p_RV.double().cumsum(-1)
    reached_RV = cumulative_RV > u_R.double()[:, None] * cumulative_RV[:, -1:]
    # Not searchsorted: a parallel sum on a GPU may rise by a rounding error at a token of probability 0.
    vocab = p_RV.shape[-1]
    index_V = torch.arange(vocab, device=p_RV.device)
    first_R = index_V.where(reached_RV & possible_RV, vocab).amin(-1)
    last_R = index_V.where(possible_RV, -1).amax(-1)
    return torch.minimum(first_R, last_R)


def draw_without_replacement(q_RV: Tensor, k: int, noise_RV: Tensor) -> Tensor:
    """k tokens per line as if drawn from q one after the other without replacement, in that order: [R, k] int64.

    Where fewer than k tokens have q > 0, the surplus ones have q = 0, and verification skips them.

    An exponential race (Gumbel top-k): token t arrives at time E_t / q_t, with E_t = -log(1 - noise_t) exponential.
    The first is t with chance q_t / sum(q); and as exponentials have no memory, the next one is first among the rest
    in the same way. (Kool et al., "Stochastic beams and where to find them", arXiv 1903.06059.)

    Args:
        noise_RV: uniform, from `RowRandom.noise` (its docstring says why not torch.rand in fp32).
    """
    _expect(0 < k <= q_RV.shape[-1], "k", k, f"1 .. {q_RV.shape[-1]}, the vocabulary")
    time_RV = -torch.log1p(-noise_RV.float().clamp(torch.finfo(torch.float32).tiny, _BELOW_ONE))
    speed_RV = torch.where(q_RV > 0, q_RV / time_RV, -1.0)  # of arrival; the largest is the first
    return top_k_of(speed_RV.contiguous(), k)[1]


def draw_in_turn(q_RV: Tensor, u_RK: Tensor) -> Tensor:
    """The same law as `draw_without_replacement` from K uniforms per line, not V: [R, K] int64.

    K draws, each from what the ones before it left of q. The better way where noise must be sent to a device. Surplus
    children are token 0, which then has been drawn already or has q = 0.
    """
    left_RV = q_RV.clone()
    tokens: list[Tensor] = []
    for u_R in u_RK.unbind(1):
        tokens.append(draw(left_RV, u_R).clamp_(min=0))
        left_RV.scatter_(1, tokens[-1][:, None], 0.0)
    return torch.stack(tokens, 1)
