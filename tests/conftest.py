"""What holds for all tests."""

import gc

from hypothesis import settings

settings.register_profile("mpicoll", deadline=None)  # a busy machine is no error
settings.load_profile("mpicoll")


def pytest_collection_finish() -> None:
    """Exempt what lives as long as the run, ten thousand tests among it, from the search for garbage."""
    gc.freeze()
