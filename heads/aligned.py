"""A training batch by what the teacher is asked: one row per position that any draft step predicts.

Step k of root p is checked against the teacher's feature f_{p+1+k} (`train/batching.py`), so all steps that predict the
same token share a row, and the teacher's distribution there is made once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import HeadBatch

ROWS = 128  # rows are padded to a multiple: a CPU's matrix kernels are built anew for every shape


class Aligned:
    """R rows, the same for all steps.

    Column j of the grid [B, T + K - 1] is the teacher's feature f_{j+1}; step k drafts there from root p = j - k. What
    no step drafts is left out. Rows that a step does not draft have weight 0; so has the padding at the end.

    weight_KR: supervised, as numbers. teacher_RH: the target's features. label_R: the text's own tokens there.
    """

    def __init__(self, batch: HeadBatch) -> None:
        steps, rows, length = batch.weight_KBT.shape
        device = batch.weight_KBT.device
        weight_KBJ = torch.zeros(steps, rows, length + steps - 1, dtype=torch.bool, device=device)
        for k in range(steps):
            weight_KBJ[k, :, k : k + length] = batch.weight_KBT[k]
        row_R, column_R = weight_KBJ.any(0).nonzero(as_tuple=True)
        padding = -len(row_R) % ROWS
        wide = torch.promote_types(batch.feature_BTH.dtype, torch.float32)
        self.weight_KR = F.pad(weight_KBJ[:, row_R, column_R].to(wide), (0, padding))
        self._row_R, self._column_R = F.pad(row_R, (0, padding)), F.pad(column_R, (0, padding))
        self._length = length
        # teacher[k] holds f_{p+1+k}: the first one, then what the last one has beyond it
        teacher = torch.cat([batch.teacher[0], batch.teacher[-1][:, length - (steps - 1) :]], 1)
        self.teacher_RH = teacher[self._row_R, self._column_R]
        label = torch.cat([batch.token_KBT[1], batch.token_KBT[-1][:, length - (steps - 1) :]], 1)
        self.label_R = label[self._row_R, self._column_R]

    def at(self, step: int, x_BT: Tensor) -> Tensor:
        """[B, T, ..] at the roots from which `step` drafts the rows: [R, ..]. Anything where it drafts nothing."""
        root_R = (self._column_R - step).clamp(0, self._length - 1)
        # index_select: the gradient of indexing with pairs is several times slower on a CPU
        return x_BT.flatten(0, 1).index_select(0, self._row_R * self._length + root_R)
