"""The progress bar of a map, by tqdm."""

import importlib
from collections.abc import AsyncGenerator, Callable, Generator, Sized
from contextlib import aclosing, closing
from typing import Any, TypeVar

from multigpu.errors import ConfigError

T = TypeVar("T")


class ProgressBar:
    def __init__(self, bar: Any, count: Callable[[Any], int] | None) -> None:
        self._bar = bar
        self._count = count

    def _shown(self, item: T) -> T:
        """Counts an item."""
        self._bar.update(1 if self._count is None or isinstance(item, Exception) else self._count(item))
        return item

    def of(self, items: Generator[T, None, None]) -> Generator[T, None, None]:
        """The items, counted as they are taken."""
        with self._bar, closing(items):
            for item in items:
                yield self._shown(item)

    async def of_async(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        with self._bar:
            async with aclosing(items):
                async for item in items:
                    yield self._shown(item)


def progress_bar(unit: str, items: Any, count: Callable[[Any], int] | None = None) -> ProgressBar:
    """A bar for a map of `items`, whose results count as `count` says; default: 1. ConfigError: tqdm is missing."""
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ConfigError("progress=True needs the package tqdm: pip install tqdm") from error
    return ProgressBar(tqdm(total=len(items) if isinstance(items, Sized) else None, unit=unit), count)
