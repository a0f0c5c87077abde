"""Joint training of target and heads (Medusa-2): a LoRA in the target, its loss, and how far the target moves.

Medusa (Cai et al., arXiv 2401.10774): section 2.2.2 trains both, section 2.3.2 keeps the target near itself with
KL(p_original || p_adapted), where the original is the same model with the LoRA switched off.

Shapes: B rows, T positions, R supervised positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from heads.adapter import CONFIG, WEIGHTS
from heads.checkpoint import recover, replace_folder
from heads.losses import Projection, Teacher, chunk_rows, distil
from heads.target import TargetAdapter
from heads.topk import argmax_of
from train.conversations import TokenRow
from train.feature_cache import feature_batches
from train.features import Features, padded_rows

# ---- the trainable target ----------------------------------------------------------------------------------


class LoraTarget(nn.Module):
    """A target with a trainable LoRA inside, made by `add_lora`.

    As a module it consists of the LoRA's tensors alone: `parameters`, `state_dict` and `load_state_dict` see nothing of
    the target, which stays frozen. Its forward is `hidden_states`. In training mode the LoRA's dropout is on.
    """

    def __init__(self, target: TargetAdapter, wrapped: Any) -> None:
        super().__init__()
        self.target = target
        self._wrapped = (wrapped,)  # in a tuple, so that it is no submodule
        self._dropouts = tuple(m for name, m in wrapped.named_modules() if ".lora_dropout." in name)
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                short = name.removeprefix("base_model.model.").replace(".default", "")
                self.register_parameter(short.replace(".", "/"), parameter)

    def forward(self, ids_BT: Tensor, valid_BT: Tensor) -> Tensor:
        return self.hidden_states(ids_BT, valid_BT)

    def hidden_states(self, ids_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, T, H], of right-padded rows, with gradient where that is enabled."""
        return self.target.hidden_states_with_grad(ids_BT, valid_BT)

    def train(self, mode: bool = True) -> LoraTarget:
        super().train(mode)
        for dropout in self._dropouts:
            dropout.train(mode)
        return self

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it the target is the original one, to the bit: the teacher."""
        with self._wrapped[0].disable_adapter():
            yield

    def write(self, folder: Path) -> None:
        """Writes adapter_config.json and adapter_model.safetensors, as peft has them, into a directory."""
        from peft import get_peft_model_state_dict

        wrapped = self._wrapped[0]
        tensors = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        config = copy.copy(wrapped.peft_config["default"])
        config.inference_mode = True
        config.base_model_name_or_path, config.revision = self.target.name, self.target.revision
        if not isinstance(config.target_modules, str):
            config.target_modules = sorted(config.target_modules)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(folder))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """`write` under a temporary name, then renamed: the adapter is whole or as it was.

        Raises:
            ValueError: `folder` exists and is not an adapter.
        """
        out = Path(folder)
        if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / CONFIG).is_file())):
            raise ValueError(f"adapter: {out} exists and is not an adapter; choose another directory")
        recover(out)
        tmp = out.with_name(f"{out.name}.tmp-{os.getpid()}")
        tmp.mkdir(parents=True)
        self.write(tmp)
        replace_folder(tmp, out)
        return out


def add_lora(
    target: TargetAdapter,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    modules: str | Sequence[str] = "all-linear",
    seed: int = 0,
) -> LoraTarget:
    """Puts a trainable LoRA (fp32 where the target is in half precision) into the target's model, in place.

    Its B is 0, so the model computes what it did before, to the bit.

    Args:
        modules: "all-linear" (all but the LM head), a regular expression, or the ends of module names.
        seed: of A, drawn on the CPU, so that it is the same on every device.

    Raises:
        ValueError: a setting out of range, no such modules, embeddings or LM head among them (drafts are compared
            with the original's through these), or a target that has an adapter already.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    for name, value, right, expected in (
        ("rank", rank, rank > 0, "1 or more"),
        ("alpha", alpha, alpha > 0, "above 0"),
        ("dropout", dropout, 0 <= dropout < 1, "0 or more, below 1"),
    ):
        if not right:
            raise ValueError(f"lora {name} is {value!r}, expected {expected}")
    if target.adapter is not None or getattr(target.model, "peft_config", None):
        raise ValueError(
            f"target {target.name!r} has an adapter already: a LoRA on top of it could not be used without it; save "
            "the merged model, and give that as target.path"
        )
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # annotated as int, used as a factor
        lora_dropout=dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # peft draws on the CPU, without a generator of its own
            wrapped: Any = get_peft_model(target.model, config)
    except ValueError as error:
        raise ValueError(f"lora modules {modules!r} of {type(target.model).__name__}: {error}") from error
    same = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
    if same != (target.embedding, target.lm_head):
        wrapped.unload()
        raise ValueError(
            f"lora modules {modules!r} include the embeddings or the LM head, expected layers between them"
        )
    return LoraTarget(target, wrapped)


# ---- its loss ----------------------------------------------------------------------------------------------


def answer_mask(rows: Sequence[TokenRow], width: int) -> Tensor:
    """[B, width] bool: the positions whose next token is the assistant's, so the first token of an answer counts, too.

    Those of heads (`train.batching.supervised_mask`) lack it, since the target's prefill gives it.
    """
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        for start, end in row.spans:
            mask[i, max(start - 1, 0) : end - 1] = True
    return mask


def target_loss_sum(hidden_RH: Tensor, teacher_RH: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """KL(teacher || student), summed over R supervised positions (nats); differentiable with respect to `hidden_RH`.

        sum_r sum_v p_rv (log p_rv - log q_rv),    p = softmax(logits_of(teacher)), q = softmax(logits_of(hidden))

    Divide by the number of supervised positions, not by that of all tokens. `logits_of` is the frozen LM head; its
    logits never exist all together.
    """
    wide = torch.promote_types(hidden_RH.dtype, torch.float32)
    weight_1R = torch.ones(1, len(hidden_RH), dtype=wide, device=hidden_RH.device)
    teacher = Teacher(teacher_RH.detach(), logits_of)
    return distil([hidden_RH], weight_1R, teacher, [Projection(logits_of)], divergence="forward_kl").total


# ---- how far the target moves ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetDrift:
    """An adapted target against the original, over supervised positions of held-out rows.

    kl: mean KL(original || adapted), nats per token. Perplexities: of the rows' own tokens. argmax_changed: share of
    positions where greedy decoding would go on differently.
    """

    positions: int
    kl: float
    base_perplexity: float
    perplexity: float
    argmax_changed: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def adapted_features(adapted: LoraTarget | TargetAdapter, rows: Sequence[TokenRow]) -> list[Tensor]:
    """The adapted target's features [length, H] of every row, on the CPU: what decoding with it reads and verifies by.

    Dropout is off, and rows share passes as they do in the feature cache, so that without a change nothing differs.
    """
    target = adapted.target if isinstance(adapted, LoraTarget) else adapted
    was_training = isinstance(adapted, LoraTarget) and adapted.training
    if isinstance(adapted, LoraTarget):
        adapted.eval()
    found: dict[int, Tensor] = {}
    for batch in feature_batches(rows):
        ids, valid = padded_rows([rows[i] for i in batch])
        hidden_BTH = target.hidden_states(ids.to(target.device), valid.to(target.device)).cpu()
        found |= {i: hidden_BTH[k, : len(rows[i].input_ids)].clone() for k, i in enumerate(batch)}
    if isinstance(adapted, LoraTarget):
        adapted.train(was_training)
    return [found[i] for i in range(len(rows))]


@torch.no_grad()
def target_drift(
    target: TargetAdapter,
    rows: Sequence[TokenRow],
    base_features: Features | Sequence[Tensor],
    features: Sequence[Tensor],
) -> TargetDrift:
    """From features of the original and of the adapted target; no further pass.

    Args:
        target: its LM head, which is the same for both.
        base_features: of row i, [length, H or more]: the original's hidden states after the final norm come first.
        features: of row i, [length, H]: see `adapted_features`.
    """
    sums = torch.zeros(5, dtype=torch.float64)  # positions, KL, -log p, -log q, changed
    for i, row in enumerate(rows):
        mask = answer_mask([row], len(row.input_ids))[0]
        label_R = torch.tensor(row.input_ids).roll(-1)[mask]
        sums += _drift_sums(target, base_features[i][mask, : target.hidden_size], features[i][mask], label_R)
    positions, kl, base_nll, nll, changed = sums.tolist()
    count = max(positions, 1.0)
    return TargetDrift(int(positions), kl / count, math.exp(base_nll / count), math.exp(nll / count), changed / count)


def _drift_sums(target: TargetAdapter, base_RH: Tensor, hidden_RH: Tensor, label_R: Tensor) -> Tensor:
    sums = torch.zeros(5, dtype=torch.float64)
    device = target.head_device
    rows = chunk_rows(target.vocab_size, device)
    whole = (base_RH.to(device, hidden_RH.dtype), hidden_RH.to(device), label_R.to(device))
    for base_rH, hidden_rH, label_r in zip(*(x.split(rows) for x in whole), strict=True):
        p_logits, q_logits = target.logits(base_rH), target.logits(hidden_rH)
        changed = argmax_of(p_logits) != argmax_of(q_logits)
        wide = torch.promote_types(p_logits.dtype, torch.float32)
        log_p, log_q = (torch.log_softmax(x.to(wide), -1) for x in (p_logits, q_logits))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        nll = [-x.gather(-1, label_r[:, None]).sum(dtype=torch.float64) for x in (log_p, log_q)]
        found = torch.stack([kl.sum(dtype=torch.float64), *nll, changed.sum(dtype=torch.float64)]).cpu()
        sums += torch.cat([torch.tensor([len(label_r)], dtype=torch.float64), found])
    return sums
