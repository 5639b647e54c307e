"""Mutations of the SDK's calls, its transport, the settings and the model repository."""

from functools import partial

from tests.mutations.mutation import Mutation

LINKS = "hostile/test_model_links.py::"

options = partial(Mutation, module="multigpu.options", checker="calls", seeds=1)
making = partial(Mutation, module="multigpu._calls.calls", checker="calls", seeds=1)
core = partial(Mutation, module="multigpu._calls.core", checker="calls", seeds=1)
mapping = partial(Mutation, module="multigpu._calls.mapping", checker="maps", seeds=1)
calls = partial(Mutation, checker="calls", seeds=1)
inference = partial(Mutation, module="multigpu._kinds.inference", checker="calls", seeds=1)
stream = partial(Mutation, module="multigpu._transport.run_stream", checker="reconnect", seeds=1)
window = partial(Mutation, module="multigpu._transport.window", checker="reconnect", seeds=1)
credentials = partial(Mutation, module="multigpu._transport.credentials", checker="credentials", seeds=1)
config = partial(Mutation, module="multigpu.config.config", checker="config", seeds=1)
values = partial(Mutation, checker="config", seeds=1)
files = partial(Mutation, module="multigpu.repository.files", checker="repository", seeds=1)

SDK = (
    options(
        name="an unknown task option is ignored",
        old="        _check_name(name, kind)\n        try:",
        new="        if name not in TaskOptions.__annotations__:\n            continue\n        try:",
        breaks="a misspelt option means the default",
    ),
    options(
        name="a deadline without a time zone is sent",
        old="    if value.tzinfo is None:",
        new="    if False:",
        breaks="a local time is taken as UTC",
    ),
    options(
        name="a negative duration is sent",
        old="    if not 0 <= seconds < 1e10:",
        new="    if not seconds < 1e10:",
        breaks="a wrong timeout is found by the master only",
    ),
    options(
        name="specs are cached by the names of their options",
        old="key: Any = (kind, content_type, *options.items()) if options",
        new="key: Any = (kind, content_type, *options) if options",
        breaks="a task runs with the options of another",
    ),
    making(
        name="all request_ids of a client are the same",
        old='return lambda: f"{prefix}{following():09x}"',
        new="return lambda: prefix",
        breaks="two tasks are one",
    ),
    making(
        name="a large payload has no checksum",
        old="        if request_id and len(data) >= LARGE_BYTES:",
        new="        if False:",
        breaks="P5: the master cannot compare payloads that it does not read",
    ),
    making(
        name="a payload above the limit of a message is sent",
        old="        if len(data) > _PAYLOAD_BYTES_MAX:",
        new="        if False:",
        breaks="one call breaks the stream that all calls share",
    ),
    making(
        name="partial outputs of the outcome are dropped",
        old="        if isinstance(answer, Outcome):  # it has",
        new="        if False:  # it has",
        breaks="P9: a stream lacks outputs that were sent while it was broken",
    ),
    making(
        name="the span of the caller is not sent",
        old="        if traceparent:\n            own",
        new="        if False:\n            own",
        breaks="spans of a run do not join the caller's trace",
    ),
    making(
        name="an item's error ends a map that returns errors",
        old="                if not answer_errors:",
        new="                if True:",
        breaks="one wrong item of a million ends the map",
        checker="maps",
    ),
    core(
        name="the task of a cancelled run goes on",
        old="                self.stream.withdraw(call)\n        return outcome(answer)",
        new="                pass\n        return outcome(answer)",
        breaks="a task whose caller has left runs to its end",
    ),
    core(
        name="a list ends after its first page",
        old="            if not response.next_page_token:",
        new="            if True:",
        breaks="tasks are missing from a list",
    ),
    core(
        name="tasks of a list have empty results",
        old="Task(message, listed=True)",
        new="Task(message, listed=False)",
        breaks="a result that was not fetched is taken for an empty one",
    ),
    calls(
        name="a missing result is an empty one",
        module="multigpu.errors",
        old="        if not result:\n            self._check_there()\n",
        new="",
        breaks="a result that has expired is taken for an empty one",
    ),
    calls(
        name="any number is a timeout",
        module="multigpu._calls.timeouts",
        old="is_number and 0 <= value < _SECONDS_MAX",
        new="is_number",
        breaks="NaN and negative timeouts reach the event loop",
        checker="maps",
    ),
    calls(
        name="submits are not bounded by bytes",
        module="multigpu._calls.submitting",
        old="(tasks == _CALL_TASKS_MAX or nbytes + size > _CALL_BYTES_MAX)",
        new="tasks == _CALL_TASKS_MAX",
        breaks="a submit of many large payloads exceeds the limit of a message",
    ),
    calls(
        name="a cancelled submit leaves its tasks",
        module="multigpu._calls.submitting",
        old="            await self.undo()\n",
        new="            pass\n",
        breaks="tasks run for a caller that has left",
    ),
    calls(
        name="a watch repeats outcomes of a frame",
        module="multigpu._calls.watching",
        old="        if skip:\n",
        new="        if False:\n",
        breaks="P9: an outcome is yielded twice",
        checker="reconnect",
    ),
    calls(
        name="a watch starts again after a break",
        module="multigpu._calls.watching",
        old="request.cursor, request.from_now = response.cursor, False",
        new="request.from_now = False",
        breaks="P9: all outcomes are yielded again",
        checker="threads",
    ),
    calls(
        name="pieces of text are not compared with the result",
        module="multigpu._kinds.generation",
        old='        if result.text != "".join(self._text) or list(result.token_ids) != self._token_ids:',
        new="        if False:",
        breaks="a gap in a generated text is not noticed",
    ),
    calls(
        name="vectors are not counted",
        module="multigpu._kinds.embedding",
        old="        if len(values) != 4 * result.dimension * texts:",
        new="        if False:",
        breaks="vectors belong to other texts",
    ),
    mapping(
        name="an ordered map yields results as they complete",
        old="        self._ordered = ordered\n",
        new="        self._ordered = False\n",
        breaks="results belong to other payloads",
    ),
    mapping(
        name="a map pulls beyond its window",
        old="        if self._tasks_max - self._pulled + self._taken < self._chunk_tasks:",
        new="        if False:",
        breaks="P10: an endless input fills the memory",
        checker="threads",
    ),
    mapping(
        name="bytes do not bound a map",
        old="        return held_bytes < self._bytes_max",
        new="        return True",
        breaks="P10: large payloads fill the memory",
    ),
    mapping(
        name="a closed map leaves its tasks",
        old="                self._stream.withdraw_where(buffer.owns)\n",
        new="                pass\n",
        breaks="tasks run for a caller that has left",
    ),
    mapping(
        name="a chunk starts after its map was closed",
        old="        self._left = True\n",
        new="",
        breaks="tasks start for a caller that has left",
        checker="threads",
    ),
    inference(
        name="arrays are sent in the host's byte order",
        old='values.astype(values.dtype.newbyteorder("<"), copy=False)',
        new="values",
        breaks="numbers of a big-endian array are others",
    ),
    inference(
        name="a task of many examples counts as one",
        old="max(1, examples.pop()) if len(examples) == 1 else 1",
        new="1",
        breaks="a task's share of energy, and the load of its worker, are wrong",
    ),
    inference(
        name="a tensor's shape is not checked",
        old="    if min(shape, default=0) < 0 or math.prod(shape) * DTYPES[dtype] != size:",
        new="    if False:",
        breaks="a damaged tensor is an unnamed error",
    ),
    calls(
        name="a unary call is not repeated",
        module="multigpu._transport.connection",
        old="if error.code() not in _REPEATED or",
        new="if True or",
        breaks="a restart of the master is an error of every call",
        checker="reconnect",
    ),
    stream(
        name="a reached master is given up",
        old="        if self._reached:\n            await",
        new="        if False:\n            await",
        breaks="tasks fail because the master was away for seconds",
    ),
    stream(
        name="a stream that always fails is opened for ever",
        old="or self._empty_streams >= _EMPTY_STREAMS_MAX:",
        new="or False:",
        breaks="calls that break their stream never end",
    ),
    stream(
        name="closing sends no withdrawals",
        old="        await self.cancellations()\n        self._closed = True",
        new="        self._closed = True",
        breaks="tasks run for a client that has left",
    ),
    window(
        name="a small call overtakes the line",
        old="        if self._waiters or not self._fits(tasks, nbytes):",
        new="        if not self._fits(tasks, nbytes):",
        breaks="a large call waits for ever",
    ),
    window(
        name="a cancelled waiter keeps its share",
        old="                self.free(tasks, nbytes)\n",
        new="                pass\n",
        breaks="the window shrinks with each cancelled call",
    ),
    credentials(
        name="a token is sent without encryption",
        old="        if not self.tls_ca and not is_loopback(address):",
        new="        if False:",
        breaks="anybody on the network reads the token",
    ),
    credentials(
        name="a token file may be readable by everybody",
        old="            if path.stat().st_mode & stat.S_IRWXO:",
        new="            if False:",
        breaks="every user of the host has the token",
    ),
    config(
        name="a flag loses to the environment",
        old="    for name, value in given.items():\n",
        new='    for name, value in given.items():\n        if sources[name] != "default":\n            continue\n',
        breaks="a flag has no effect",
    ),
    config(
        name="keys of other programs' sections are not checked",
        old='            reject_unknown(table, fields_of(SECTIONS[section]), "key")\n',
        new="",
        breaks="a misspelt key means the default until another program starts",
    ),
    config(
        name="a profile replaces values that are set",
        old='            if sources[name] == "default":\n                values[name], sources',
        new="            if True:\n                values[name], sources",
        breaks="a setting has no effect",
    ),
    config(
        name="MGPU_MASTER is not the worker's",
        old=', *fields_of(cls)[field_name].metadata["also"])',
        new=",)",
        breaks="a worker connects to the default address",
    ),
    values(
        name="values may exceed their maximum",
        module="multigpu.config.fields",
        old='    if limits["maximum"] is not None and',
        new="    if False and",
        breaks="a setting out of range is found when it is used",
    ),
    values(
        name="the unit of a size is ignored",
        module="multigpu.config.values",
        old="    return int(match[1]) * unit",
        new="    return int(match[1])",
        breaks="64MiB are 64 bytes",
    ),
    files(
        name="pickles are loaded",
        old="    if rejected:\n",
        new="    if False:\n",
        breaks="a model runs code of its author",
    ),
    files(
        name="a folder beside the repository counts as inside",
        old='real.startswith(inside.rstrip("/") + "/")',
        new="real.startswith(inside)",
        breaks="a link serves files that were not to be served",
    ),
    files(
        name="links in a model folder are not looked at",
        old="            if path.is_symlink():\n",
        new="            if False:\n",
        breaks="a chat template or hidden external data is any file that the worker can read",
        checker=LINKS + "test_a_link_out_of_the_repository_hides_its_folder",
    ),
    files(
        name="a link to a folder in a model folder is followed",
        old="                if path.is_dir():\n",
        new="                if False:\n",
        breaks="a link in that folder leads out of the repository",
        checker=LINKS + "test_a_linked_folder_hides_the_folder_of_its_model",
    ),
    files(
        name="model.toml may be a link out of the repository",
        module="multigpu.repository.scan",
        old="        if root is not None:\n            reject_outside(folder / FILE_NAME, root)\n",
        breaks="its error messages quote a file outside",
        checker=LINKS + "test_a_link_out_of_the_repository_hides_its_folder",
    ),
    files(
        name="a safetensors file may be too short",
        old="    if size != 8 + header_bytes + end:",
        new="    if False:",
        breaks="an incomplete copy is loaded",
    ),
    files(
        name="the hash of a fresh file is cached",
        old="    if time.time_ns() - status.st_mtime_ns > SETTLED_NS:",
        new="    if True:",
        breaks="a replaced file passes with the hash of the one before",
    ),
    files(
        name="files without a recorded hash are loaded",
        old="        if wanted is None:\n",
        new="        if wanted is None:\n            continue\n        if False:\n",
        breaks="an added file passes the check of hashes",
    ),
    files(
        name="a broken version hides the one before it",
        module="multigpu.repository.scan",
        old='        if specs and wanted == "latest":',
        new='        if wanted == "latest":',
        breaks="an incomplete copy of a new version takes a model out of service",
    ),
    calls(
        name="spans are made of unsampled tasks",
        module="multigpu.daemon.telemetry",
        old="    if not parent.is_valid or not parent.trace_flags & SAMPLED:",
        new="    if not parent.is_valid:",
        breaks="the daemons do not follow the client's sampling",
        checker="telemetry",
    ),
)
