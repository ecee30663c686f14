"""The private side of a communicator: channel, settings, topology, and the cache that keeps them on it."""
