"""A sample's rows in the next MoE layer, predicted from its rows in this one: NetMoE's conditional table.

A prediction that is the same for all samples is useless: it adds a constant to a node's costs, and every
assignment puts equally many samples there (SYSTEMS 5.4). Therefore the table is conditional: for the rows of
expert e in this layer, the share that expert f of the next one has of the same samples, counted over past
steps. All numbers are integers, so all ranks predict alike. The engine's other prediction, the next gate on
this layer's input, needs no table.

Shapes: I samples, E experts of this layer, F of the next.
"""

from __future__ import annotations

import numpy as np

from penstock.routing.integers import Ints, exact_product

FORGETTING = 8
"""The table keeps 1 - 1 / FORGETTING of itself whenever it learns."""
PARTS = 1 << 16
"""Parts into which an expert's rows are divided, so that shares are integers."""


class ConditionalTable:
    """Shares of the next layer's experts in the rows of samples, by expert of this layer."""

    def __init__(self, num_experts: int, following: int | None = None) -> None:
        """Begin empty. num_experts, following: of this layer, and of the next one; None: as many."""
        self._seen_EF = np.zeros((num_experts, num_experts if following is None else following), np.int64)

    @property
    def seen(self) -> Ints:
        """The learned counts; writing into them replaces what the table knows."""
        return self._seen_EF

    def learn(self, counts_IE: Ints, following_IF: Ints) -> None:
        """Add the rows of the same samples in this and the next layer, forgetting old ones slowly."""
        together_EF = exact_product(counts_IE.T, following_IF)
        self._seen_EF = self._seen_EF - self._seen_EF // FORGETTING + together_EF

    def predict(self, counts_IE: Ints) -> Ints:
        """Return the rows of every sample by expert of the next layer, [I, F]; experts of this layer that
        were never seen add none."""
        totals_E = self._seen_EF.sum(axis=1, keepdims=True)
        parts_EF = self._seen_EF * PARTS // np.maximum(totals_E, 1)
        rows_IF: Ints = exact_product(counts_IE, parts_EF) // PARTS
        return rows_IF
