"""The tasks by id, in blocks of neighbouring ids: a caller can iterate over ten million tasks block by block, while
tasks are added and removed between two blocks.
"""

from collections import defaultdict
from collections.abc import Iterator

from multigpu_master.core.model import Task

BLOCK_BITS = 10


class TaskTable:
    """A dictionary of tasks by id, with a few methods of dict."""

    def __init__(self) -> None:
        self._blocks: defaultdict[int, dict[int, Task]] = defaultdict(dict)

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def __contains__(self, task_id: int) -> bool:
        return self.get(task_id) is not None

    def get(self, task_id: int) -> Task | None:
        block = self._blocks.get(task_id >> BLOCK_BITS)
        return None if block is None else block.get(task_id)

    def add(self, task: Task) -> None:
        self._blocks[task.task_id >> BLOCK_BITS][task.task_id] = task

    def discard(self, task: Task) -> None:
        """Removes the task if it is in the table. Does not remove another task that has its id by now: a requeued dead
        letter keeps its id.
        """
        task_id = task.task_id
        block = self._blocks.get(task_id >> BLOCK_BITS)
        if block is not None and block.get(task_id) is task:
            del block[task_id]
            if not block:
                del self._blocks[task_id >> BLOCK_BITS]

    def values(self) -> Iterator[Task]:
        """Every task. No task may be added or removed during the iteration."""
        for block in self._blocks.values():
            yield from block.values()

    def blocks(self) -> list[list[Task]]:
        """All tasks as of now, block by block."""
        return [list(block.values()) for block in self._blocks.values()]

    def blocks_before(self, task_id: int) -> Iterator[list[Task]]:
        """The tasks below an id, the newest first, by block. Tasks may be added and removed between two blocks."""
        last = task_id >> BLOCK_BITS
        for number in sorted([number for number in self._blocks if number <= last], reverse=True):
            block = self._blocks.get(number, {})
            yield sorted([t for t in block.values() if t.task_id < task_id], key=lambda t: -t.task_id)

    def blocks_after(self, task_id: int) -> Iterator[list[Task]]:
        """The tasks above an id, the oldest first. Otherwise like blocks_before."""
        first = task_id >> BLOCK_BITS
        for number in sorted([number for number in self._blocks if number >= first]):
            block = self._blocks.get(number, {})
            yield sorted([t for t in block.values() if t.task_id > task_id], key=lambda t: t.task_id)
