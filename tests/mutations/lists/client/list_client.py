"""Mutations of the client: run_state.py (unsettled calls, and sending them again), the origin of its settings, and
mgpuctl: files that it writes, operations that it rejects, and the supervisor of `mgpuctl up`.
"""

from functools import partial

from tests.mutations.mutation import Mutation

run_state = partial(Mutation, module="multigpu._transport.run_state", checker="client", seeds=300)
stream = partial(Mutation, checker="stream", seeds=30)
settings = partial(Mutation, checker="access", seeds=1)

ADMIN = "client/cli/test_admin.py::"
FILES = "client/cli/test_files.py::"
HOST = "client/cli/doctor/test_host.py::"
SUPERVISOR = "client/cli/test_supervisor.py::"
TASKS = "client/cli/test_tasks.py::"

command = partial(Mutation, seeds=1)
vectors = partial(command, module="multigpu.cli.kinds.vectors")
supervisor = partial(command, module="multigpu.cli.local.supervisor")
dead_letters = partial(command, module="multigpu.cli.tasks.dead_letters")
certificates = partial(command, module="multigpu.cli.doctor.host")

CLIENT = (
    run_state(
        name="a reference is sent before the stream's offer",
        old="        if not self.sharing.shares:\n            return None\n",
        new="",
        breaks="a master that was restarted rejects the references of a client's earlier stream",
    ),
    run_state(
        name="a reference outlives its master",
        old="            for call in self._unsettled.values():\n                call.place = None\n",
        new="            pass\n",
        breaks="a client sends references to files written before a restart of the master",
    ),
    run_state(
        name="unsettled calls are not sent on a new stream",
        old="self._outbox = deque(call for call in self._unsettled.values() if not call.deferred)",
        new="self._outbox = deque(call for call in self._outbox if not call.deferred)",
        breaks="P9: a call waits for ever for a task that was lost with its stream",
    ),
    run_state(
        name="withdrawals are not sent on a new stream",
        old="        self._cancel_outbox = list(self._cancelling)\n",
        new="",
        breaks="a task whose caller is gone runs on",
    ),
    run_state(
        name="the answer to a withdrawal settles the next call",
        old="            if withdrawals and request_id in withdrawals and message.error.type == WITHDRAWN:",
        new="            if False:",
        breaks="a call that is started again after its withdrawal fails with TaskCancelled",
    ),
    stream(
        name="the stream's writer is not supervised",
        module="multigpu._transport.run_stream",
        old="writer = group.create_task(",
        new="writer = asyncio.get_running_loop().create_task(",
        breaks="after an error of the writer every call of the client waits for ever",
    ),
    stream(
        name="a task's own options are sent unread",
        module="multigpu.options",
        old="(value := _own_value(name, options.pop(name)))",
        new="(value := options.pop(name))",
        breaks="a value that no message can carry ends the stream that all calls share",
    ),
    settings(
        name="arguments of a client replace the config file",
        module="multigpu._calls.core",
        old="dataclasses.replace(load_client_config(), **settings)",
        new="dataclasses.replace(load_client_config().__class__(), **settings)",
        breaks="a client drops TLS and its token",
    ),
    settings(
        name="--config is for administrative calls only",
        module="multigpu.cli.options",
        old="    os.environ[config.FILE_VARIABLE] = str(Path(str(path)).resolve())\n",
        new="",
        breaks="commands of the SDK, threads and child processes do not read the file given by --config",
    ),
)

COMMANDS = (
    vectors(
        name="two runs may write one file of vectors",
        checker=FILES + "test_a_run_that_ended_early_is_resumed_after_its_last_whole_row",
        old="fcntl.LOCK_EX | fcntl.LOCK_NB",
        new="fcntl.LOCK_SH | fcntl.LOCK_NB",
        breaks="two runs of embed mix their rows in one file",
    ),
    vectors(
        name="vectors of different dimensions are mixed",
        checker=FILES + "test_workers_that_disagree_on_the_dimension_are_found_out",
        old="if self.rows and rows.shape[1] != self.dimension:",
        new="if False:",
        breaks="workers that serve different models under one name make an unreadable file",
    ),
    vectors(
        name="a file of vectors replaces a device",
        checker=FILES + "test_a_device_is_not_replaced_by_a_file",
        old="if self.path.exists() and not self.path.is_file():",
        new="if False:",
        breaks="embed -o replaces a pipe or a device by a file",
    ),
    vectors(
        name="an interrupted run leaves no rows",
        checker=FILES + "test_a_run_that_ended_early_is_resumed_after_its_last_whole_row",
        old="        if not self.rows:\n            super().leave()\n",
        new="        if True:\n            super().leave()\n",
        breaks="embed --resume has nothing to continue after",
    ),
    command(
        name="control characters reach the terminal",
        checker=TASKS + "test_dead_letters",
        module="multigpu.cli.text",
        old="char if char.isprintable() else",
        new="char if True else",
        breaks="text of a task can write anything to an operator's terminal",
    ),
    command(
        name="a byte order mark belongs to the first line",
        checker=FILES + "test_lines_keep_blanks_and_order_and_lose_only_their_ends",
        module="multigpu.cli.tasks.lines",
        old="if number == 1:",
        new="if number == 0:",
        breaks="the first line of a file is embedded with an invisible character",
    ),
    command(
        name="unknown tasks are cancelled with success",
        checker=TASKS + "test_tasks_cancel",
        module="multigpu.cli.tasks.tasks",
        old="    if answer.unknown:\n",
        new="    if False:\n",
        breaks="a script believes that a task is cancelled which the master does not know",
    ),
    dead_letters(
        name="a queue's dead letters are deleted without a confirmation",
        checker=TASKS + "test_dead_letters",
        old="if queue and not yes:",
        new="if False:",
        breaks="a mistyped command deletes every dead letter of a queue",
    ),
    dead_letters(
        name="dead letters are chosen by ids and by a queue",
        checker=TASKS + "test_dead_letters",
        old="if bool(task_ids) == bool(queue):",
        new="if False:",
        breaks="requeue with ids and --queue requeues more than the ids",
    ),
    command(
        name="an ambiguous prefix names the first worker",
        checker=ADMIN + "test_workers_are_named_by_the_beginning_of_an_id",
        module="multigpu.cli.admin",
        old="if len(found) == 1:",
        new="if found:",
        breaks="drain stops another worker than the one that was meant",
    ),
    command(
        name="a limit resets the other limit",
        checker=ADMIN + "test_queues",
        module="multigpu.cli.tasks.queues",
        old="known.limits.bytes_max if bytes_max is None",
        new="0 if bytes_max is None",
        breaks="--tasks-max removes the limit of bytes",
    ),
    command(
        name="drain --wait does not wait",
        checker=ADMIN + "test_drain_waits_for_the_leases",
        module="multigpu.cli.fleet.workers",
        old="while wait and any(",
        new="while False and any(",
        breaks="a script stops a worker that still runs tasks",
    ),
    command(
        name="a token replaces a file",
        checker=ADMIN + "test_a_token_is_never_written_over_a_file",
        module="multigpu.cli.security.tokens",
        old="if output is not None and (output.exists() or output.is_symlink()):",
        new="if False:",
        breaks="another token is lost",
    ),
    supervisor(
        name="the first restart waits",
        checker=SUPERVISOR + "test_restart_delays_grow_from_nothing_to_the_limit",
        old="    if deaths_in_a_row == 1:\n        return 0.0\n",
        new="",
        breaks="a worker that was killed is not started again at once",
    ),
    supervisor(
        name="a rejected process is started again",
        checker=SUPERVISOR + "test_rejection_is_not_retried_and_ends_the_fleet",
        old="if returncode in child.spec.rejections and not",
        new="if False and not",
        breaks="a master that rejects its journal is restarted for ever",
    ),
    supervisor(
        name="a rejected worker ends a fleet that was ready",
        checker=SUPERVISOR + "test_rejection_of_a_worker_is_passing_trouble_once_the_fleet_was_ready",
        old=" and not (self.proven and child.spec.may_recover):",
        new=":",
        breaks="one worker that cannot read its settings for a moment ends a running fleet",
    ),
    certificates(
        name="a key that every user can read is accepted",
        checker=HOST + "test_certificates_that_can_not_be_used",
        old="if mode & 0o007:",
        new="if False:",
        breaks="doctor accepts a key that every user of the host can use",
    ),
    certificates(
        name="an expired certificate is a warning",
        checker=HOST + "test_certificates",
        old="if days < 0:",
        new="if False:",
        breaks="doctor exits without a failure although no client can connect",
    ),
)
