"""Asynchronous training: parameter server, all-to-all exchange and gossip."""
