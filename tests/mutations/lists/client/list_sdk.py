"""Mutations of the SDK's calls, its transport, the settings and the model repository."""

from functools import partial

from tests.mutations.mutation import Mutation

LINKS = "hostile/test_model_links.py::"

options = partial(Mutation, module="multigpu.options", checker="calls")
making = partial(Mutation, module="multigpu._calls.calls", checker="calls")
core = partial(Mutation, module="multigpu._calls.core", checker="calls")
mapping = partial(Mutation, module="multigpu._calls.mapping", checker="maps")
calls = partial(Mutation, checker="calls")
inference = partial(Mutation, module="multigpu._kinds.inference", checker="calls")
stream = partial(Mutation, module="multigpu._transport.run_stream", checker="reconnect")
window = partial(Mutation, module="multigpu._transport.window", checker="reconnect")
credentials = partial(Mutation, module="multigpu._transport.credentials", checker="credentials")
config = partial(Mutation, module="multigpu.config.config", checker="config")
values = partial(Mutation, checker="config")
files = partial(Mutation, module="multigpu.repository.files", checker="repository")

SDK = (
    options(
        "a misspelt option means the default",
        "        _check_name(name, kind)\n        try:",
        "        if name not in TaskOptions.__annotations__:\n            continue\n        try:",
    ),
    options("a local time is taken as UTC", "if value.tzinfo is None:"),
    options("a wrong timeout is found by the master only", "if not 0 <= seconds < 1e10:", "if not seconds < 1e10:"),
    options("a task runs with the options of another", "content_type, *options.items()", "content_type, *options"),
    making("all request_ids of a client are the same", 'lambda: f"{prefix}{following():09x}"', "lambda: prefix"),
    making(
        "P5: the master cannot compare payloads that it does not read", "if request_id and len(data) >= LARGE_BYTES:"
    ),
    making("one call breaks the stream that all calls share", "if len(data) > _PAYLOAD_BYTES_MAX:"),
    making("P9: a stream lacks outputs that were sent while it was broken", "isinstance(answer, Outcome):", "False:"),
    making("spans of a run do not join the caller's trace", "traceparent:\n            own", "False:\n            own"),
    making("one wrong item of a million ends the map", "if not answer_errors:", "if True:", checker="maps"),
    core(
        "a task whose caller has left runs to its end",
        "                self.stream.withdraw(call)\n        return outcome(answer)",
        "                pass\n        return outcome(answer)",
    ),
    core("a list ends after its first page", "            if not response.next_page_token:", "            if True:"),
    core("a result that was not fetched is taken for an empty one", "message, listed=True", "message, listed=False"),
    calls(
        "a result that has expired is taken for an empty one",
        "        if not result:\n            self._check_there()\n",
        module="multigpu.outcome",
    ),
    calls(
        "NaN and negative timeouts reach the event loop",
        "is_number and 0 <= value < _SECONDS_MAX",
        "is_number",
        module="multigpu._calls.timeouts",
        checker="maps",
    ),
    calls(
        "a submit of many large payloads exceeds the limit of a message",
        "(tasks == _CALL_TASKS_MAX or nbytes + size > _CALL_BYTES_MAX)",
        "tasks == _CALL_TASKS_MAX",
        module="multigpu._calls.submitting",
    ),
    calls("a cancelled submit leaves its tasks", "await self.undo()", module="multigpu._calls.submitting"),
    calls("P9: an outcome is yielded twice", "if skip:", module="multigpu._calls.watching", checker="reconnect"),
    calls(
        "P9: all outcomes are yielded again",
        "request.cursor, request.from_now = response.cursor, False",
        "request.from_now = False",
        module="multigpu._calls.watching",
        checker="threads",
    ),
    calls(
        "a gap in a generated text is not noticed",
        'if result.text != "".join(self._text) or list(result.token_ids) != self._token_ids:',
        module="multigpu._kinds.generation",
    ),
    calls(
        "vectors are not counted", "if len(values) != 4 * result.dimension * texts:", module="multigpu._kinds.embedding"
    ),
    mapping("an ordered map yields results as they complete", "self._ordered = ordered\n", "self._ordered = False\n"),
    mapping(
        "P10: an endless input fills the memory",
        "if self._tasks_max - self._pulled + self._taken < self._chunk_tasks:",
        checker="threads",
    ),
    mapping("P10: large payloads fill the memory", "return held_bytes < self._bytes_max", "return True"),
    mapping("a closed map leaves its tasks", "self._stream.withdraw_where(buffer.owns)"),
    mapping("tasks start for a caller that has left", "self._left = True", checker="threads"),
    inference(
        "arrays are sent in the host's byte order",
        'values.astype(values.dtype.newbyteorder("<"), copy=False)',
        "values",
    ),
    inference(
        "a task's share of energy, and the load of its worker, are wrong",
        "max(1, examples.pop()) if len(examples) == 1 else 1",
        "1",
    ),
    inference(
        "a tensor's shape is not checked", "if min(shape, default=0) < 0 or math.prod(shape) * DTYPES[dtype] != size:"
    ),
    calls(
        "a restart of the master is an error of every call",
        "if error.code() not in _REPEATED or",
        "if True or",
        module="multigpu._transport.connection",
        checker="reconnect",
    ),
    stream("tasks fail because the master was away for seconds", "if self._reached:"),
    stream("calls that break their stream never end", "or self._empty_streams >= _EMPTY_STREAMS_MAX:", "or False:"),
    stream(
        "tasks run for a client that has left",
        "await self.wait_for_cancellations()\n        self._closed",
        "self._closed",
    ),
    window("a large call waits for ever", "        if self._waiters or not", "        if not"),
    window("the window shrinks with each cancelled call", "self.free(tasks, nbytes)"),
    credentials("anybody on the network reads the token", "if not self.tls_ca and not is_loopback(address):"),
    credentials("every user of the host has the token", "if path.stat().st_mode & stat.S_IRWXO:"),
    config(
        "a flag loses to the environment",
        "    for name, value in given.items():\n",
        '    for name, value in given.items():\n        if sources[name] != "default":\n            continue\n',
    ),
    config(
        "a misspelt key means the default until another program starts",
        'reject_unknown(table, fields_of(SECTIONS[section]), "key")',
    ),
    config(
        "a profile replaces values that are set",
        '            if sources[name] == "default":\n                values[name], sources',
        "            if True:\n                values[name], sources",
    ),
    config("a worker connects to the default address", ', *fields_of(cls)[field_name].metadata["also"])', ",)"),
    values(
        "values may exceed their maximum", 'limits["maximum"] is not None', "False", module="multigpu.config.fields"
    ),
    values("64MiB are 64 bytes", "int(match[1]) * unit", "int(match[1])", module="multigpu.config.values"),
    files("a model runs code of its author", "if rejected:"),
    files("a link serves files that were not to be served", 'inside.rstrip("/") + "/"', "inside"),
    files(
        "a chat template or hidden external data is any file that the worker can read",
        "if path.is_symlink():",
        checker=LINKS + "test_a_link_out_of_the_repository_hides_its_folder",
    ),
    files(
        "a link to a folder in a model folder is followed",
        "if path.is_dir():",
        checker=LINKS + "test_a_linked_folder_hides_the_folder_of_its_model",
    ),
    files(
        "model.toml may be a link out of the repository",
        "        if root is not None:\n            reject_outside(folder / FILE_NAME, root)\n",
        module="multigpu.repository.scan",
        checker=LINKS + "test_a_link_out_of_the_repository_hides_its_folder",
    ),
    files("an incomplete copy is loaded", "if size != 8 + header_bytes + end:"),
    files(
        "a replaced file passes with the hash of the one before",
        "    if time.time_ns() - status.st_mtime_ns > SETTLED_NS:",
        "    if True:",
    ),
    files(
        "an added file passes the check of hashes",
        "        if wanted is None:\n",
        "        if wanted is None:\n            continue\n        if False:\n",
    ),
    files(
        "an incomplete copy of a new version takes a model out of service",
        '        if specs and wanted == "latest":',
        '        if wanted == "latest":',
        module="multigpu.repository.scan",
    ),
    calls(
        "the daemons do not follow the client's sampling",
        "    if not parent.is_valid or not parent.trace_flags & SAMPLED:",
        "    if not parent.is_valid:",
        module="multigpu.daemon.telemetry",
        checker="telemetry",
    ),
)
