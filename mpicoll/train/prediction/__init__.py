"""Predicted steps of training on more hosts: computation measured here, communication simulated."""
