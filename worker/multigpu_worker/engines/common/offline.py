"""The one way to transformers: nothing is ever fetched, for the hub is switched off before it is imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# What it would report about weights that don't fit is checked where models are loaded.
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import transformers

__all__ = ["transformers"]
