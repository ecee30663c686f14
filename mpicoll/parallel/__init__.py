"""Strategies of synchronous training: data parallel, sharded, tensor, pipeline, local SGD."""
