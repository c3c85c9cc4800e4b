"""The mixture-of-experts layer, in parts that are exchanged without touching the scheduler."""

from penstock.moe.build import build_layer
from penstock.moe.choices import Choice, ExpertChoice, SoftChoice, TokenChoice
from penstock.moe.config import MoEConfig
from penstock.moe.counter import SampleKeys
from penstock.moe.experts.base import Experts, StackedExperts
from penstock.moe.experts.feed_forward import GeluExperts, SharedExpert, SwiGLUExperts
from penstock.moe.experts.modules import ModuleExperts
from penstock.moe.experts.product import Product, grouped_product
from penstock.moe.gates.base import Gate, TokenGate
from penstock.moe.gates.cosine import CosineGate
from penstock.moe.gates.expert_bias import ExpertBias
from penstock.moe.gates.expert_choice import ExpertChoiceGate
from penstock.moe.gates.groups import ExpertGroups
from penstock.moe.gates.linear import NoisyGate, SigmoidGate, SoftmaxGate
from penstock.moe.gates.soft import SoftGate
from penstock.moe.hooks.base import Hook, two_way
from penstock.moe.hooks.compression import Bfloat16Rows, Int8Rows
from penstock.moe.layer import MoELayer, update_expert_biases
from penstock.moe.orders.base import Order, OrderPlan
from penstock.moe.orders.einsum import EinsumOrder
from penstock.moe.orders.index import IndexOrder
from penstock.moe.orders.merged import MergedOrder
from penstock.moe.orders.sort import SortOrder
from penstock.moe.tokens import Tokens
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
