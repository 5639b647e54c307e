"""Mutations of the client: run_state.py (unsettled calls, and sending them again), the origin of its settings, and
mgpuctl: files that it writes, operations that it rejects, and the supervisor of `mgpuctl up`.
"""

from functools import partial

from tests.mutations.mutation import Mutation

run_state = partial(Mutation, module="multigpu._transport.run_state", checker="client", seeds=300)
stream = partial(Mutation, checker="stream", seeds=30)
settings = partial(Mutation, checker="access")

ADMIN = "client/cli/test_admin.py::"
FILES = "client/cli/test_files.py::"
HOST = "client/cli/doctor/test_host.py::"
SUPERVISOR = "client/cli/test_supervisor.py::"
TASKS = "client/cli/test_tasks.py::"

command = partial(Mutation)
vectors = partial(command, module="multigpu.cli.kinds.vectors")
supervisor = partial(command, module="multigpu.cli.local.supervisor")
dead_letters = partial(command, module="multigpu.cli.tasks.dead_letters")
certificates = partial(command, module="multigpu.cli.doctor.host")

CLIENT = (
    run_state(
        "a master that was restarted rejects the references of a client's earlier stream",
        "        if not self.sharing.shares:\n            return None\n",
    ),
    run_state(
        "a client sends references to files written before a restart of the master",
        "            for call in self._unsettled.values():\n                call.place = None\n",
    ),
    run_state(
        "P9: a call waits for ever for a task that was lost with its stream",
        "self._outbox = deque(call for call in self._unsettled.values() if not call.deferred)",
        "self._outbox = deque(call for call in self._outbox if not call.deferred)",
    ),
    run_state("a task whose caller is gone runs on", "self._cancel_outbox = list(self._cancelling)"),
    run_state(
        "a call that is started again after its withdrawal fails with TaskCancelled",
        "if withdrawals and request_id in withdrawals and message.error.type == WITHDRAWN:",
    ),
    stream(
        "after an error of the writer every call of the client waits for ever",
        "writer = group.create_task(",
        "writer = asyncio.get_running_loop().create_task(",
        module="multigpu._transport.run_stream",
    ),
    stream(
        "a value that no message can carry ends the stream that all calls share",
        "(value := _per_task_value(name, options.pop(name)))",
        "(value := options.pop(name))",
        module="multigpu.options",
    ),
    settings(
        "a client drops TLS and its token",
        "load_client_config() if connection is None",
        "load_client_config().__class__() if connection is None",
        module="multigpu._calls.core",
    ),
    settings(
        "commands of the SDK, threads and child processes do not read the file given by --config",
        "os.environ[config.FILE_VARIABLE] = str(Path(str(path)).resolve())",
        module="multigpu.cli.options",
    ),
)

COMMANDS = (
    vectors(
        "two runs of embed mix their rows in one file",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        checker=FILES + "test_a_run_that_ended_early_is_resumed_after_its_last_whole_row",
    ),
    vectors(
        "vectors of different dimensions are mixed",
        "if self.rows and rows.shape[1] != self.dimension:",
        checker=FILES + "test_workers_that_disagree_on_the_dimension_are_found_out",
    ),
    vectors(
        "embed -o replaces a pipe or a device by a file",
        "if self.path.exists() and not self.path.is_file():",
        checker=FILES + "test_a_device_is_not_replaced_by_a_file",
    ),
    vectors(
        "embed --resume has nothing to continue after",
        "        if not self.rows:\n            super().leave()\n",
        "        if True:\n            super().leave()\n",
        checker=FILES + "test_a_run_that_ended_early_is_resumed_after_its_last_whole_row",
    ),
    command(
        "text of a task can write anything to an operator's terminal",
        "char if char.isprintable() else",
        "char if True else",
        checker=TASKS + "test_dead_letters",
        module="multigpu.cli.text",
    ),
    command(
        "the first line of a file is embedded with an invisible character",
        "if number == 1:",
        "if number == 0:",
        checker=FILES + "test_lines_keep_blanks_and_order_and_lose_only_their_ends",
        module="multigpu.cli.tasks.lines",
    ),
    command(
        "a script believes that a task is cancelled which the master does not know",
        "if answer.unknown:",
        checker=TASKS + "test_tasks_cancel",
        module="multigpu.cli.tasks.tasks",
    ),
    dead_letters(
        "a mistyped command deletes every dead letter of a queue",
        "if queue and not yes:",
        checker=TASKS + "test_dead_letters",
    ),
    dead_letters(
        "requeue with ids and --queue requeues more than the ids",
        "if bool(task_ids) == bool(queue):",
        checker=TASKS + "test_dead_letters",
    ),
    command(
        "drain stops another worker than the one that was meant",
        "if len(found) == 1:",
        "if found:",
        checker=ADMIN + "test_workers_are_named_by_the_beginning_of_an_id",
        module="multigpu.cli.admin",
    ),
    command(
        "--tasks-max removes the limit of bytes",
        "known.limits.bytes_max if bytes_max is None",
        "0 if bytes_max is None",
        checker=ADMIN + "test_queues",
        module="multigpu.cli.tasks.queues",
    ),
    command(
        "a script stops a worker that still runs tasks",
        "while wait and any(",
        "while False and any(",
        checker=ADMIN + "test_drain_waits_for_the_leases",
        module="multigpu.cli.fleet.workers",
    ),
    command(
        "a token replaces a file",
        "if output is not None and (output.exists() or output.is_symlink()):",
        checker=ADMIN + "test_a_token_is_never_written_over_a_file",
        module="multigpu.cli.security.tokens",
    ),
    supervisor(
        "a worker that was killed is not started again at once",
        "    if deaths_in_a_row == 1:\n        return 0.0\n",
        checker=SUPERVISOR + "test_restart_delays_grow_from_nothing_to_the_limit",
    ),
    supervisor(
        "a master that rejects its journal is restarted for ever",
        "if returncode in child.spec.rejections and not",
        "if False and not",
        checker=SUPERVISOR + "test_rejection_is_not_retried_and_ends_the_fleet",
    ),
    supervisor(
        "one worker that cannot read its settings for a moment ends a running fleet",
        " and not (self.proven and child.spec.may_recover):",
        ":",
        checker=SUPERVISOR + "test_rejection_of_a_worker_is_passing_trouble_once_the_fleet_was_ready",
    ),
    certificates(
        "doctor accepts a key that every user of the host can use",
        "if mode & 0o007:",
        checker=HOST + "test_certificates_that_can_not_be_used",
    ),
    certificates(
        "doctor exits without a failure although no client can connect",
        "if days < 0:",
        checker=HOST + "test_certificates",
    ),
)
