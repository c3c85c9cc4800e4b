"""The mixture-of-experts layer, in parts that are exchanged without touching the scheduler."""

from penstock.moe.build import build_layer
from penstock.moe.config import MoEConfig
from penstock.moe.experts import (
    Experts,
    GeluExperts,
    ModuleExperts,
    SharedExpert,
    StackedExperts,
    SwiGLUExperts,
)
from penstock.moe.gates import CosineRouter, ExpertChoiceRouter, NoisyRouter, SigmoidRouter, SoftRouter
from penstock.moe.hooks import Bfloat16Rows, Hook, Int8Rows, two_way
from penstock.moe.layer import MoELayer, update_expert_biases
from penstock.moe.permute.einsum import EinsumPermutation
from penstock.moe.permute.merged import MergedPermutation
from penstock.moe.permute.slots import IndexPermutation
from penstock.moe.permute.sort import Permutation, PermutationPlan, SortPermutation
from penstock.moe.products import Product, grouped_product
from penstock.moe.routers import (
    Choice,
    ExpertBias,
    ExpertChoice,
    ExpertGroups,
    Router,
    SampleKeys,
    SoftChoice,
    SoftmaxRouter,
    TokenChoice,
    TokenRouter,
    Tokens,
)
from penstock.routing.routes import ChunkRoute, RouteMaker, Routes

__all__ = [
    "Bfloat16Rows",
    "Choice",
    "ChunkRoute",
    "CosineRouter",
    "EinsumPermutation",
    "ExpertBias",
    "ExpertChoice",
    "ExpertChoiceRouter",
    "ExpertGroups",
    "Experts",
    "GeluExperts",
    "Hook",
    "IndexPermutation",
    "Int8Rows",
    "MergedPermutation",
    "MoEConfig",
    "MoELayer",
    "ModuleExperts",
    "NoisyRouter",
    "Permutation",
    "PermutationPlan",
    "Product",
    "RouteMaker",
    "Router",
    "Routes",
    "SampleKeys",
    "SharedExpert",
    "SigmoidRouter",
    "SoftChoice",
    "SoftRouter",
    "SoftmaxRouter",
    "SortPermutation",
    "StackedExperts",
    "SwiGLUExperts",
    "TokenChoice",
    "TokenRouter",
    "Tokens",
    "build_layer",
    "grouped_product",
    "two_way",
    "update_expert_biases",
]
