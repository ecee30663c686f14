"""Optimizers and learning-rate schedules, for trainer, shards and parameter server."""
