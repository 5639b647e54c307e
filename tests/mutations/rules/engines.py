"""Tests of the engines as checkers, a few files each."""

from functools import partial

from tests.mutations.rules.pytest_checkers import run_tests


def _check(*paths: str) -> "partial[None]":
    return partial(_run, tuple(f"worker/{path}" for path in paths))


def _run(paths: tuple[str, ...], _seed: int) -> None:
    run_tests(paths)


# Each must take less than 15 s of CPU.
artifacts = _check("graphs/test_artifacts.py")
vectors = _check(
    "embed/test_embed_cache_file.py",
    *(
        f"embed/test_embed_cache.py::test_{name}"
        for name in (
            "memory_evicts_the_least_recently_used_vectors",
            "vectors_expire",
            "nan_and_infinity_are_not_cached",
        )
    ),
)
content = _check("embed/test_embed_cache.py::test_every_file_of_a_model_is_hashed")
gates = _check(
    "infer/test_gate.py",
    "infer/test_precision.py",
    "infer/test_infer_rows.py::test_per_example_follows_first_dimensions",
)
arrays = _check(
    "infer/test_infer_rows.py::test_coincidental_number_of_rows_is_detected",
)
tokens = _check("generate/test_generate_parts.py")
plans = _check("graphs/test_tensorrt_run.py")
