"""Decentralised training: mailboxes between ranks, without servers."""
