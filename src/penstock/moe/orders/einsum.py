"""The einsum order (GShard, Lepikhin et al. 2021): dispatch and combine are products with masks.

A mask has one number for every token and slot, T * E * S in all, and every product needs M times that number
of multiplications, nearly all with zero: this is GShard's cost, and the reason for the other orders. It is
the only order for SoftMoE, whose masks have no zeros (there S slots are of one sample and a mask L * E * S).
Shapes: T tokens = B samples of L tokens, M hidden size, k choices, E experts (total), S slots per expert
(and sample), C chunks, R rows. Where slots do not belong to samples, B = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.moe.choices import Choice, ExpertChoice, SoftChoice, TokenChoice
from penstock.moe.orders.base import Order, OrderPlan
from penstock.moe.orders.index import chunk_rows
from penstock.moe.orders.masks import ExpertMasks, Masks, SoftMasks, TokenMasks
from penstock.routing.sizes import capacity_slots, split_sizes


class EinsumOrder(Order):
    """Rows are mask^T x, outputs are (mask * weights) rows; autograd derives backward.

    Where tokens choose, slots are filled as in `IndexOrder`, and the same choices are dropped. A chunk is a
    range of an expert's slots; with samples, they are the slots of sample 0, then those of sample 1, ...
    num_experts, capacity_factor, min_capacity: as in `IndexOrder`.
    """

    name, kinds, dynamic = "einsum", ("token", "expert", "soft"), False

    def __init__(self, num_experts: int, *, capacity_factor: float = 1.0, min_capacity: int = 4) -> None:
        self.num_experts = num_experts
        self.capacity_factor, self.min_capacity = capacity_factor, min_capacity

    def plan(self, choice: Choice, chunks: int) -> OrderPlan:
        masks: Masks
        match choice:
            case TokenChoice():
                count, choices = choice.counted, choice.experts_Tk.shape[1]
                slots = capacity_slots(
                    count, self.num_experts, choices, self.capacity_factor, self.min_capacity
                )
                masks = TokenMasks.of(choice, self.num_experts, slots)
            case ExpertChoice():
                masks = ExpertMasks.of(choice)
            case SoftChoice():
                masks = SoftMasks.of(choice)
        sizes = split_sizes(masks.slots, chunks)
        return OrderPlan(masks.tokens, chunk_rows(sizes, self.num_experts), None, sizes, masks)

    def order(self, x_TM: Tensor, choice: Choice, plan: OrderPlan) -> Tensor:
        masks: Masks = plan.rows
        mask_BLES = masks.dispatch(choice, x_TM.dtype)
        x_BLM = x_TM.unflatten(0, mask_BLES.shape[:2])
        rows_ENM = torch.einsum("bles,blm->ebsm", mask_BLES, x_BLM).flatten(1, 2)
        assert plan.slots is not None
        return torch.cat([rows.flatten(0, 1) for rows in rows_ENM.split(plan.slots, dim=1)])

    def unorder(self, rows_RM: Tensor, weights: Tensor, plan: OrderPlan) -> Tensor:
        masks: Masks = plan.rows
        assert plan.slots is not None
        mask_BLES = masks.combine(weights.to(rows_RM.dtype))
        chunks = zip(rows_RM.split(plan.chunk_rows), plan.slots, strict=True)
        rows_ENM = torch.cat([rows.unflatten(0, (self.num_experts, size)) for rows, size in chunks], dim=1)
        rows_EBSM = rows_ENM.unflatten(1, (mask_BLES.shape[0], mask_BLES.shape[3]))
        return torch.einsum("bles,ebsm->blm", mask_BLES, rows_EBSM).flatten(0, 1)
