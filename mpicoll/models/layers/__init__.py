"""Layers with hand-derived gradients. A layer holds no parameters: they are arguments of its methods."""

from mpicoll.models.layers.activations import Dropout, Gelu, Relu, Reshape
from mpicoll.models.layers.attention import CausalSelfAttention
from mpicoll.models.layers.batch_normalization import BatchNorm, batch_norms
from mpicoll.models.layers.convolution_layers import Conv2d, Convolution
from mpicoll.models.layers.dense_layers import Dense
from mpicoll.models.layers.embedding import ByteEmbedding
from mpicoll.models.layers.layer_interface import (
    Arrays,
    Constant,
    Initial,
    Layer,
    Normal,
    RandomKey,
    Shape,
    Workspace,
    product,
    sum_of_rows,
)
from mpicoll.models.layers.normalization import LayerNorm
from mpicoll.models.layers.pooling import AveragePool, MaxPool
from mpicoll.models.layers.residual import Residual

__all__ = [
    "Arrays",
    "AveragePool",
    "BatchNorm",
    "ByteEmbedding",
    "CausalSelfAttention",
    "Constant",
    "Conv2d",
    "Convolution",
    "Dense",
    "Dropout",
    "Gelu",
    "Initial",
    "Layer",
    "LayerNorm",
    "MaxPool",
    "Normal",
    "RandomKey",
    "Relu",
    "Reshape",
    "Residual",
    "Shape",
    "Workspace",
    "batch_norms",
    "product",
    "sum_of_rows",
]
