"""The mixture-of-experts layer, in parts that are exchanged without touching the scheduler."""

from penstock.moe.build import build_layer
from penstock.moe.choices import Choice, ExpertChoice, SampleKeys, SoftChoice, TokenChoice, Tokens
from penstock.moe.config import MoEConfig
from penstock.moe.experts import (
    Experts,
    GeluExperts,
    ModuleExperts,
    SharedExpert,
    StackedExperts,
    SwiGLUExperts,
)
from penstock.moe.hooks import Bfloat16Rows, Hook, Int8Rows, two_way
from penstock.moe.layer import MoELayer, update_expert_biases
from penstock.moe.permute.einsum import EinsumOrder
from penstock.moe.permute.merged import MergedOrder
from penstock.moe.permute.sort import IndexOrder, Order, OrderPlan, SortOrder
from penstock.moe.products import Product, grouped_product
from penstock.moe.routers import (
    CosineGate,
    ExpertBias,
    ExpertChoiceGate,
    ExpertGroups,
    Gate,
    NoisyGate,
    SigmoidGate,
    SoftGate,
    SoftmaxGate,
    TokenGate,
)
from penstock.routing.routes import ChunkRoute, RouteMaker, Routes

__all__ = [
    "Bfloat16Rows",
    "Choice",
    "ChunkRoute",
    "CosineGate",
    "EinsumOrder",
    "ExpertBias",
    "ExpertChoice",
    "ExpertChoiceGate",
    "ExpertGroups",
    "Experts",
    "Gate",
    "GeluExperts",
    "Hook",
    "IndexOrder",
    "Int8Rows",
    "MergedOrder",
    "MoEConfig",
    "MoELayer",
    "ModuleExperts",
    "NoisyGate",
    "Order",
    "OrderPlan",
    "Product",
    "RouteMaker",
    "Routes",
    "SampleKeys",
    "SharedExpert",
    "SigmoidGate",
    "SoftChoice",
    "SoftGate",
    "SoftmaxGate",
    "SortOrder",
    "StackedExperts",
    "SwiGLUExperts",
    "TokenChoice",
    "TokenGate",
    "Tokens",
    "build_layer",
    "grouped_product",
    "two_way",
    "update_expert_biases",
]
