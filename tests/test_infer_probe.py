"""The load-time probe passes models that can score trees and refuses those that cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from heads.cache import SlotCache
from heads.target import TargetAdapter
from infer.probe import prefix_length, probe_tree, require_tree
from tests.tiny import ARCHITECTURES, CONFIGS, tiny_target


@pytest.mark.parametrize("name", CONFIGS)
def test_right_models_pass(name: str) -> None:
    assert probe_tree(tiny_target(name)) < 1e-5
    require_tree(tiny_target(name))


def altered(target: TargetAdapter, **changes: Any) -> TargetAdapter:
    """A model that overwrites some of its arguments, as one does that ignores them."""
    whole = target.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        for key, change in changes.items():
            if kwargs.get(key) is not None:
                kwargs[key] = change(kwargs[key])
        return whole(*args, **kwargs)

    target.model.forward = forward
    return target


def arange_like(positions: torch.Tensor) -> torch.Tensor:
    return positions[:, :1] + torch.arange(positions.shape[1])


BROKEN: dict[str, dict[str, Any]] = {
    "sees everything": {"attention_mask": lambda mask: mask.zero_()},
    "one row for all": {"attention_mask": lambda mask: mask[:, :, -1:].expand_as(mask)},
    "counts slots": {"position_ids": arange_like},
    "off by one": {"position_ids": lambda positions: positions + 1},
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_that_ignore_mask_or_positions_are_refused(name: str, how: str) -> None:
    target = altered(tiny_target(name), **BROKEN[how])
    if (name, how) == ("llama", "off by one"):  # rotary attention depends on differences of positions only
        require_tree(target)
        return
    with pytest.raises(ValueError, match="wrongly: relative error"):
        require_tree(target)


def test_a_cache_that_loses_the_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    commit = SlotCache.commit
    monkeypatch.setattr(
        SlotCache, "commit", lambda self, bases, paths: commit(self, bases, [range(len(path)) for path in paths])
    )
    with pytest.raises(ValueError, match="tree path"):
        require_tree(target)


def test_a_failing_model_is_refused_with_its_reason() -> None:
    target = tiny_target("llama")

    def fail(mask: torch.Tensor) -> torch.Tensor:
        raise KeyError("only a mask per layer type")

    with pytest.raises(ValueError, match="KeyError: 'only a mask per layer type'"):
        require_tree(altered(target, attention_mask=fail))


def test_every_refusal_names_the_way_out() -> None:
    stateful = tiny_target("llama")
    stateful.model._is_stateful = True
    foreign = tiny_target("llama")
    foreign.masks.foreign = ("linear_attention",)
    failing = altered(tiny_target("llama"), attention_mask=lambda mask: mask[..., 1:])
    wrong = altered(tiny_target("llama"), attention_mask=lambda mask: mask.zero_())
    for target, reason in ((stateful, "recurrent"), (foreign, "linear_attention"), (failing, "Error"), (wrong, "4-D")):
        with pytest.raises(ValueError, match=f"{reason}.*--plain$"):
            require_tree(target)


def test_small_windows_are_crossed_and_large_ones_are_not() -> None:
    config = copy.deepcopy(ARCHITECTURES["mistral"])
    for window, prefix in ((2, 5), (16, 30), (64, 126), (65, 5), (4096, 5)):
        config.sliding_window = window
        assert prefix_length(tiny_target(config)) == prefix
    config.sliding_window = 2
    require_tree(tiny_target(config))


def test_nan_is_refused() -> None:
    target = tiny_target("llama")
    target.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="nan"):
        require_tree(target)
