"""The list of packages, and nothing else: everything static is in pyproject.toml.

`patches/` lies beside `hf_kvcache/` but is installed inside it, so no top-level `patches` package is ever created.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["hf_kvcache", "hf_kvcache.*"]),
        "hf_kvcache.patches",
        *(f"hf_kvcache.patches.{name}" for name in find_packages("patches")),
    ],
    package_dir={"hf_kvcache.patches": "patches"},
)
