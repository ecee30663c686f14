"""Packages are found, not listed. Everything else stands in pyproject.toml, which cannot say what stands here."""

from setuptools import find_packages, setup

KERNELS = "mpicoll.kernels"

setup(
    packages=[
        *find_packages(include=["mpicoll", "mpicoll.*"]),
        KERNELS,
        *(f"{KERNELS}.{name}" for name in find_packages("kernels")),
    ],
    # kernels/ stands at the top of the repository; no top-level `kernels` is installed.
    package_dir={KERNELS: "kernels"},
)
