"""Virtual devices: larger clusters than this machine's cores can run.

Nothing is computed, everything is sent.
Compute tasks sleep as long as the cost model says; transfers are real bytes over the real transport; the
routing of tokens comes from a workload, generated or recorded. Every output of such a run says so, see
`VirtualConfig.label`.
"""

from penstock.lab.virtual.stack import VirtualConfig, VirtualStack, build_virtual

__all__ = ["VirtualConfig", "VirtualStack", "build_virtual"]
