"""Training under the supervisor while ranks are killed: ``python -m tests.kills --help``."""
