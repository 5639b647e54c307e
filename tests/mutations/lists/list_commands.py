"""Mutations of mgpuctl: files that it writes, operations that it rejects, and the supervisor of `mgpuctl up`."""

from functools import partial

from tests.mutations.mutation import Mutation

command = partial(Mutation, checker="commands", seeds=1)
vectors = partial(command, module="multigpu.cli.kinds.vectors")
supervisor = partial(command, module="multigpu.cli.local.supervisor")
dead_letters = partial(command, module="multigpu.cli.tasks.dead_letters")
certificates = partial(command, module="multigpu.cli.doctor.host")

COMMANDS = (
    vectors(
        name="two runs may write one file of vectors",
        old="fcntl.LOCK_EX | fcntl.LOCK_NB",
        new="fcntl.LOCK_SH | fcntl.LOCK_NB",
        breaks="two runs of embed mix their rows in one file",
    ),
    vectors(
        name="vectors of different dimensions are mixed",
        old="if self.rows and rows.shape[1] != self.dimension:",
        new="if False:",
        breaks="workers that serve different models under one name make an unreadable file",
    ),
    vectors(
        name="a file of vectors replaces a device",
        old="if self.path.exists() and not self.path.is_file():",
        new="if False:",
        breaks="embed -o replaces a pipe or a device by a file",
    ),
    vectors(
        name="an interrupted run leaves no rows",
        old="        if not self.rows:\n            super().leave()\n",
        new="        if True:\n            super().leave()\n",
        breaks="embed --resume has nothing to continue after",
    ),
    command(
        name="control characters reach the terminal",
        module="multigpu.cli.text",
        old="char if char.isprintable() else",
        new="char if True else",
        breaks="text of a task can write anything to an operator's terminal",
    ),
    command(
        name="a byte order mark belongs to the first line",
        module="multigpu.cli.tasks.lines",
        old="if number == 1:",
        new="if number == 0:",
        breaks="the first line of a file is embedded with an invisible character",
    ),
    command(
        name="unknown tasks are cancelled with success",
        module="multigpu.cli.tasks.tasks",
        old="    if answer.unknown:\n",
        new="    if False:\n",
        breaks="a script believes that a task is cancelled which the master does not know",
    ),
    dead_letters(
        name="a queue's dead letters are deleted without a confirmation",
        old="if queue and not task_ids and not yes:",
        new="if False:",
        breaks="a mistyped command deletes every dead letter of a queue",
    ),
    dead_letters(
        name="dead letters are chosen by ids and by a queue",
        old="if bool(request.task_ids) == bool(request.queue):",
        new="if False:",
        breaks="requeue with ids and --queue requeues more than the ids",
    ),
    command(
        name="an ambiguous prefix names the first worker",
        module="multigpu.cli.rpc",
        old="if len(found) == 1:",
        new="if found:",
        breaks="drain stops another worker than the one that was meant",
    ),
    command(
        name="a limit resets the other limit",
        module="multigpu.cli.tasks.queues",
        old="            wanted.CopyFrom(known.limits)\n",
        new="            pass\n",
        breaks="--tasks-max removes the limit of bytes",
    ),
    command(
        name="drain --wait does not wait",
        module="multigpu.cli.fleet.workers",
        old="while wait and any(",
        new="while False and any(",
        breaks="a script stops a worker that still runs tasks",
    ),
    command(
        name="a token replaces a file",
        module="multigpu.cli.security.tokens",
        old="if output is not None and (output.exists() or output.is_symlink()):",
        new="if False:",
        breaks="another token is lost",
    ),
    supervisor(
        name="the first restart waits",
        old="    if deaths_in_a_row == 1:\n        return 0.0\n",
        new="",
        breaks="a worker that was killed is not started again at once",
    ),
    supervisor(
        name="a rejected process is started again",
        old="if returncode in child.spec.rejections and not",
        new="if False and not",
        breaks="a master that rejects its journal is restarted for ever",
    ),
    supervisor(
        name="children outlive their supervisor",
        old="prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)",
        new="prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)",
        breaks="after kill -9 of `mgpuctl up` its master still holds the data directory",
    ),
    certificates(
        name="a key that every user can read is accepted",
        old="if mode & 0o007:",
        new="if False:",
        breaks="doctor accepts a key that every user of the host can use",
    ),
    certificates(
        name="an expired certificate is a warning",
        old="if days < 0:",
        new="if False:",
        breaks="doctor exits without a failure although no client can connect",
    ),
)
