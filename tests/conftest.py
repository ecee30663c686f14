"""What holds for all tests."""

from hypothesis import settings

settings.register_profile("mpicoll", deadline=None)  # a busy machine is no error
settings.load_profile("mpicoll")
