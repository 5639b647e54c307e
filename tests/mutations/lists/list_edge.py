"""Mutations of the master's edge: its RPC services, the conversion of messages, and security."""

from functools import partial

from tests.mutations.mutation import Mutation

BAD_INPUT, TASKS, OPERATORS = (f"integration/test_{name}.py::test_" for name in ("bad_input", "tasks", "operators"))
TENANTS, TOKENS, LIMITS, WORKERS = (
    f"security/test_{name}.py::test_" for name in ("tenants", "tokens", "token_limits", "workers")
)
AUDIT, TLS, LISTENERS, NAMES = (f"security/test_{name}.py::test_" for name in ("audit", "tls", "listeners", "names"))
SPECS, WIRE = "master/journal/test_specs.py::test_", "master/test_wire_devices.py::test_"
REGRESSIONS, MODELS = "hostile/test_regressions.py::test_", "core/placement/test_residency.py::test_"


auth = partial(Mutation, module="multigpu_master.security.auth")
tokens = partial(Mutation, module="multigpu_master.security.tokens")
listeners = partial(Mutation, module="multigpu_master.security.listeners")
audit = partial(Mutation, module="multigpu_master.security.audit")
setup = partial(Mutation, module="multigpu_master.security.setup")
specs = partial(Mutation, module="multigpu_master.wire.specs")
leases = partial(Mutation, module="multigpu_master.wire.leases")
devices = partial(Mutation, module="multigpu_master.wire.devices")
models = partial(Mutation, module="multigpu_master.wire.models")
workers = partial(Mutation, module="multigpu_master.wire.workers")
intake = partial(Mutation, module="multigpu_master.rpc.intake")
queries = partial(Mutation, module="multigpu_master.rpc.queries")
service = partial(Mutation, module="multigpu_master.rpc.task_service")
sessions = partial(Mutation, module="multigpu_master.rpc.worker_service")
admin = partial(Mutation, module="multigpu_master.rpc.admin.service")

SECURITY = (
    auth("any token may call any method", "if not token.roles & roles:", "if not token.roles:",
         TOKENS + "each_role_may_call_exactly_its_methods"),
    auth("readers may call administrative methods", "return _ROLES.get(method, _ADMINS)",
         "return _ROLES.get(method, _READERS)", TOKENS + "each_role_may_call_exactly_its_methods"),
    auth("the first of two tokens counts", "if len(headers) == 1 and isinstance(text, str) and",
         "if isinstance(text, str) and", TOKENS + "two_tokens_or_another_scheme_are_rejected"),
    auth("streams of a revoked token go on", "call.cancel()", checker=TOKENS + "revoking_a_token_ends_its_streams"),
    auth("streams of an expired token go on", "call_later(left_s, self._end, call)",
         "call_later(left_s, self._ended.add, call)", TOKENS + "an_expired_token_ends_its_streams"),
    auth("who revokes its own token gets no answer", "if c is not this_call]:", "if c]:",
         TOKENS + "an_administrator_can_revoke_its_own_token"),
    auth("a token may have one call too many", "len(token.open_calls) >= limit:", "len(token.open_calls) > limit:",
         LIMITS + "open_calls_of_a_token_are_limited"),
    auth("token_calls_max has no effect", "token.calls_max or self._calls_max", "token.calls_max or 1000",
         LIMITS + "the_masters_limit_of_calls_is_the_default"),
    auth("a worker's certificate serves as a client's", "if required not in kinds and roles != _ANY:",
         "if not kinds and roles != _ANY:", TLS + "certificates_of_workers_and_clients_are_not_interchangeable"),
    auth("callers without a token fill the log", "if now - self._logged_s >= LOG_INTERVAL_S:", "if True:",
         AUDIT + "rejected_callers_cannot_fill_the_audit_log"),
    tokens("the secret of a token is not checked", "if token is None or not hmac.compare_digest(",
           "if token is None or hmac.compare_digest(b'', ", TOKENS + "an_invalid_token_is_rejected"),
    tokens("an expired token is valid", "return None if self.expired(token) else token", "return token",
           TOKENS + "an_expired_token_is_unknown"),
    tokens("a worker takes an id that begins with its own", 'if p.endswith("*") else worker_id == p',
           'if p.endswith("*") else worker_id.startswith(p)', WORKERS + "a_worker_cannot_take_anothers_id"),
    tokens("a rate counts batches, not tasks", "self._level -= tasks", "self._level -= 1",
           LIMITS + "a_rate_holds_on_average"),
    tokens("an idle token may submit any number of tasks at once", "min(self.tasks_per_s, self._level + (",
           "(self._level + (", LIMITS + "a_rate_holds_on_average"),
    tokens("a worker's token may have other roles", "if WORKER in roles and len(roles) > 1:", "if not roles:",
           TOKENS + "an_invalid_token_request_is_rejected"),
    tokens("an administrator's token names queues that do not limit it",
           "if queues and (ADMIN in roles or WORKER in roles):", "if queues and WORKER in roles:",
           TOKENS + "an_invalid_token_request_is_rejected"),
    setup("the lost first token stays valid", "tokens.remove(old.token_id)",
          checker=TOKENS + "the_first_token_is_private_and_created_again_if_lost"),
    setup("a secret is in a second file", "_write_secret(path, text)",
          "_write_secret(path, text); path.with_name('copy').write_text(text)",
          TOKENS + "tokens_survive_a_restart_and_secrets_are_not_stored"),
    listeners("tokens cross the network in the clear", "if config.require_tokens and not config.tls_cert:",
              "if config.require_tokens and not (config.tls_cert or config.insecure):",
              LISTENERS + "allowed_listen_settings"),
    listeners("metrics are open to other hosts", "not config.insecure and not config.tls_client_ca:",
              "not config.insecure and not config.tls_cert:", LISTENERS + "allowed_listen_settings"),
    listeners("any user of the host may read the key", "if key.stat().st_mode & stat.S_IRWXO:",
              checker=TLS + "a_key_readable_by_others_is_rejected"),
    listeners("an invalid file ends TLS",
              'log.warning("new certificates are not used", error=str(error))\n                return None', "raise",
              TLS + "certificates_are_renewed_without_a_restart"),
    listeners("a worker's certificate serves as the master's", "        if not fits:\n", "        if fits is None:\n",
              LISTENERS + "a_master_with_a_certificate_of_another_kind_is_rejected"),
    audit("a cancelled call has an effect and no line", "return await asyncio.shield(work)", "return await work",
          AUDIT + "a_cancelled_call_is_audited_or_has_no_effect"),
    audit("a call without a line takes effect", "            except OSError as error:\n                text",
          "            except PermissionError as error:\n                text",
          AUDIT + "without_the_audit_file_calls_have_no_effect"),
    audit("the audit log grows without limit", "FILE_BYTES_MAX:", "100 * FILE_BYTES_MAX:", AUDIT + "files_are_rotated"),
    audit("one call writes megabytes to the audit log", "return fields if len(text) <= REQUEST_CHARS_MAX else",
          "return fields if text else", AUDIT + "a_large_request_is_cut"),
)  # fmt: skip

MESSAGES = (
    specs("large specs fill the memory", "> LARGE_BYTES_MAX:", "> 1 << 40:", SPECS + "living_large_specs_are_limited"),
    specs("specs that are gone count for ever", "self._large_bytes[queue] -= size", "self._large_bytes[queue] -= 0",
          SPECS + "living_large_specs_are_limited"),
    specs("result_ttl_max_s has no effect", "if spec.result_ttl_s > self._result_ttl_max_s:",
          checker=SPECS + "the_result_ttl_is_limited"),
    specs("a deadline is read by another clock", "seconds_of(m.deadline) + skew_s", "seconds_of(m.deadline)",
          SPECS + "a_deadline_is_converted_to_the_masters_clock"),
    leases("a worker names an attempt beyond the limit", "min(max(m.attempt, 1), ATTEMPTS_MAX)", "max(m.attempt, 1)",
           REGRESSIONS + "a_held_lease_is_limited"),
    devices("a number that is not finite is passed on", "message.ClearField(name)",
            checker=WIRE + "a_non_finite_number_is_absent"),
    devices("energy that is not finite counts", "math.isfinite(x) and x >= 0.0", "x >= 0.0 or not math.isfinite(x)",
            WIRE + "invalid_energy_is_ignored"),
    devices("a sample of any size is kept", "    if len(wire) > BYTES_MAX:\n        wire = device_pb2.DeviceTelemetry",
            "    if len(wire) < 0:\n        wire = device_pb2.DeviceTelemetry",
            WIRE + "a_large_message_keeps_only_the_fields_of_the_core"),
    devices("a text of any length is kept with each heartbeat", "getattr(message, field)[:TEXT_CHARS_MAX]",
            "getattr(message, field)", REGRESSIONS + "a_long_text_of_a_heartbeat_is_cut"),
    models("a catalog of any size is kept", "    if m.ByteSize() > HELLO_BYTES_MAX:", "    if not m.ByteSize():",
           MODELS + "invalid_reports_are_rejected_or_truncated"),
    models("any number of loaded models is kept", "map(_resident, itertools.islice(m.models, MODELS_MAX))",
           "map(_resident, m.models)", REGRESSIONS + "a_large_hello_is_rejected"),
    workers("a hello of any size is kept", "size > HELLO_BYTES_MAX:", "not size:",
            REGRESSIONS + "a_large_hello_is_rejected"),
    workers("a worker's id changes the terminal",
            '    for field in ("worker_id", "host", "version", "store_address"):',
            '    for field in ("host", "version", "store_address"):',
            NAMES + "names_with_control_characters_are_rejected"),
    intake("a tenant joins the task of another by its request_id",
           "if queue is not None and not caller.may_use_queue(queue):",
           "if live is None and queue is not None and not caller.may_use_queue(queue):",
           TENANTS + "joining_another_tenants_task_is_rejected"),
    intake("a tenant submits to the queue of another", "    if not caller.may_use_queue(queue):\n        return ev",
           "    if False:\n        return ev", TENANTS + "submitting_to_another_tenants_queue_is_rejected"),
    intake("a rejection by rate has no delay", 'send fewer", delay_s', 'send fewer", None',
           LIMITS + "tasks_beyond_the_rate_are_rejected_with_a_delay"),
    queries("a tenant counts the tasks of another", "and (self.queues is None or spec.queue in self.queues)",
            "and True", TENANTS + "lists_and_counts_hold_own_tasks_only"),
    service("a tenant watches the outcomes of another", "if queues is not None and row.queue not in queues:",
            checker=TENANTS + "watch_sends_own_outcomes_only"),
    service("a tenant gets the task of another", "if not queries.may_see(found):",
            checker=TENANTS + "a_guessed_task_id_is_not_found"),
    service("Get waits longer than the caller asked", "min(seconds_of(request.wait), WAIT_MAX_S)", "WAIT_MAX_S",
            TASKS + "get_waits_only_as_long_as_asked"),
    sessions("a worker takes the id of another", "not caller.may_use_worker_id(info.worker_id):",
             "not caller.worker_ids:", WORKERS + "a_worker_cannot_take_anothers_id"),
    sessions("a worker of an older protocol joins", "if hello.protocol_version != PROTOCOL_VERSION:",
             "if hello.protocol_version > PROTOCOL_VERSION:", BAD_INPUT + "an_invalid_hello_is_rejected"),
    sessions("a heartbeat holds the event loop for seconds",
             "check_count(len(frame.heartbeat.leases), self._leases_max, LEASES_IN_FRAME)", "pass",
             REGRESSIONS + "a_worker_lists_no_more_leases_than_it_can_hold"),
    admin("a connected worker is forgotten", "        if worker.session:\n            raise",
          "        if False:\n            raise", OPERATORS + "a_connected_or_unknown_worker_cannot_be_forgotten"),
    admin("a tenant sees the strategy of another", "visible = queues is None or request.queue in queues",
          "visible = True", TENANTS + "strategies_of_hidden_queues_are_those_of_unknown_queues"),
    admin("the name of a queue changes the terminal", 'check_printable("queue", name)',
          checker=REGRESSIONS + "rules_for_an_invalid_queue_name_are_rejected"),
)  # fmt: skip

HTTP2 = "hostile/test_http2.py::test_"

# What the master does before it knows a peer's token.
grpc_server = partial(Mutation, module="multigpu.daemon.grpc_server")
small_requests = partial(Mutation, module="multigpu_master.rpc.requests")
services = partial(Mutation, module="multigpu_master.rpc.services")
health = partial(Mutation, module="multigpu_master.rpc.health_service")

TRANSPORT = (
    health(
        "a peer that reads nothing holds 40 KiB for each call",
        "(is_tcp and self._calls[peer] >= CALLS_MAX) or ",
        "",
        HTTP2 + "open_health_calls_are_limited",
    ),
    health(
        "any number of Watch streams of health",
        "if self._watches >= WATCHES_MAX",
        "if self._watches >= 1_000_000",
        HTTP2 + "watches_of_all_connections_are_limited",
    ),
    grpc_server(
        "compressed messages are unpacked",
        '    ("grpc.compression_enabled_algorithms_bitset", 1),\n',
        "",
        HTTP2 + "compressed_messages_are_not_decompressed",
    ),
    grpc_server(
        "gRPC decodes the path of any call",
        "return self._running_loop.create_task(self._answer(method))",
        "return super()._make_request_call_future(method)",
        HTTP2 + "an_undecodable_path_ends_one_stream_only",
    ),
    small_requests(
        "health requests may be large",
        "time.process_time() > cpu_end_s or time.monotonic()",
        "time.monotonic()",
        HTTP2 + "health_requests_hold_little_together",
    ),
    services(
        "a request is read before the token is checked",
        """        serve = serve if method.client_streaming else _with_request_read(serve, name, read)
        serve = serve if auth is None else auth.with_checks(serve, name)
""",
        """        serve = serve if auth is None else auth.with_checks(serve, name)
        serve = serve if method.client_streaming else _with_request_read(serve, name, read)
""",
        HTTP2 + "a_message_without_a_token_is_not_read",
    ),
)

EDGE: tuple[Mutation, ...] = (*SECURITY, *MESSAGES, *TRANSPORT)
