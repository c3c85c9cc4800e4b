"""Gloo's own all-to-all, on connections as the system makes them: what other systems run on."""

from __future__ import annotations

from penstock.runtime.transport import GlooTransport, GroupTransport


class ShippedTransport(GlooTransport):
    """The column `as shipped`: nothing of Penstock's under a schedule but the schedule itself."""

    _fill = GroupTransport._fill
