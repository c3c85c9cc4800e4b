"""The names of Penstock's own ops. An op is a string; anybody may register more."""

from __future__ import annotations

from typing import Final


class Op:
    """The op names of the tasks in Penstock's own steps."""

    EMBED: Final = "EM"
    ATTENTION: Final = "AT"
    COUNTS: Final = "N"
    DISPATCH_GATHER: Final = "DG"
    DISPATCH: Final = "D"
    DISPATCH_SCATTER: Final = "DS"
    SHARED: Final = "S"
    EXPERTS: Final = "X"
    COMBINE_GATHER: Final = "CG"
    COMBINE: Final = "C"
    COMBINE_SCATTER: Final = "CS"
    UNPERMUTE: Final = "U"
    HEAD: Final = "HD"
    STATISTICS: Final = "ST"
    ALL_REDUCE: Final = "AR"
    PARTIAL_ALL_REDUCE: Final = "PR"
    EXPERT_ALL_REDUCE: Final = "XR"
    LOADS: Final = "LG"

    # an optimiser of which every rank owns a share: see `features.sharded_optimizer.ops`
    SCATTER: Final = "RA"
    PARTIAL_SCATTER: Final = "RP"
    EXPERT_SCATTER: Final = "RX"
    NORM: Final = "NM"
    UPDATE: Final = "OA"
    PARTIAL_UPDATE: Final = "OP"
    EXPERT_UPDATE: Final = "OX"
    PARAMETERS: Final = "PA"
    PARTIAL_PARAMETERS: Final = "PP"
    EXPERT_PARAMETERS: Final = "PX"

    # experts as replicas: see `features.expert_replicas.ops`
    REPLICA_PARAMETERS: Final = "GP"
    REPLICA_GRADIENTS: Final = "GG"
    PLAN_REPLICAS: Final = "PE"
    COMPARE_REPLICAS: Final = "PH"

    # tensor parallelism: see `features.tensor_parallel.ops`
    EMBED_SCATTER: Final = "ES"
    EMBED_REDUCE: Final = "ER"
    TOKEN_GATHER: Final = "TG"
    TOKEN_COPY: Final = "TC"
    HEADS: Final = "TA"
    TOKEN_SCATTER: Final = "TS"
    TOKEN_REDUCE: Final = "TR"
    GATE: Final = "GT"
    DENSE_NORM: Final = "FN"
    DENSE_GATHER: Final = "FG"
    DENSE_COPY: Final = "FC"
    DENSE: Final = "FF"
    DENSE_SCATTER: Final = "FS"
    DENSE_REDUCE: Final = "FR"
    DENSE_ADD: Final = "FA"
    HEAD_GATHER: Final = "HG"
    HEAD_COPY: Final = "HC"
    LOGITS: Final = "HV"
    PEAKS: Final = "HX"
    LOSS: Final = "HL"
    CHOICES: Final = "NC"
    KEEP_TOKENS: Final = "MS"
    GATHER_TOKENS: Final = "MG"
    KEEP_OUTPUT: Final = "US"
    GATHER_OUTPUT: Final = "UG"

    # shards of experts: see `features.expert_sharding.ops`
    SHARD_GATHER: Final = "XG"
    SHARD_SCATTER: Final = "XS"
    DEAL_SLOTS: Final = "SD"
    GATHER_SLOTS: Final = "SG"
    ROWS_GATHER: Final = "BG"
    ROWS_REDUCE: Final = "BR"
    ROWS_KEEP: Final = "BS"

    # samples that move: see `features.sample_placement.ops`
    SAMPLE_COUNTS: Final = "SC"
    SAMPLE_LOADS: Final = "SN"
    SAMPLE_PLACES: Final = "SP"
    SAMPLE_HOMES: Final = "SH"
    SAMPLE_MOVE: Final = "SM"
    ROW_ORDER: Final = "RO"
