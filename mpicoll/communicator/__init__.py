"""Private state of a communicator: channel, settings, topology, and its caching as an attribute."""
