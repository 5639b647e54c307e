"""Mutations of the master's edge: its RPC services, the conversion of messages, and security."""

from functools import partial
from typing import Any

from tests.mutations.mutation import Mutation

BAD_INPUT, TASKS, OPERATORS = (f"integration/test_{name}.py::test_" for name in ("bad_input", "tasks", "operators"))
TENANTS, TOKENS, LIMITS, WORKERS = (
    f"security/test_{name}.py::test_" for name in ("tenants", "tokens", "token_limits", "workers")
)
AUDIT, TLS, LISTENERS, NAMES = (f"security/test_{name}.py::test_" for name in ("audit", "tls", "listeners", "names"))
SPECS, WIRE = "master/journal/test_specs.py::test_", "master/test_wire_devices.py::test_"
REGRESSIONS, MODELS = "hostile/test_regressions.py::test_", "core/placement/test_residency.py::test_"


def of(module: str, test: str, old: str, new: str, breaks: str) -> Mutation:
    return Mutation(
        name=f"{module.replace('.', '/')}: {breaks}", module=f"multigpu_master.{module}", old=old, new=new,
        breaks=breaks, checker=test, seeds=1,
    )  # fmt: skip


auth: Any = partial(of, "security.auth")
tokens: Any = partial(of, "security.tokens")
listeners: Any = partial(of, "security.listeners")
audit: Any = partial(of, "security.audit")
setup: Any = partial(of, "security.setup")
specs: Any = partial(of, "wire.specs")
leases: Any = partial(of, "wire.leases")
devices: Any = partial(of, "wire.devices")
models: Any = partial(of, "wire.models")
workers: Any = partial(of, "wire.workers")
intake: Any = partial(of, "rpc.intake")
queries: Any = partial(of, "rpc.queries")
service: Any = partial(of, "rpc.task_service")
sessions: Any = partial(of, "rpc.worker_service")
admin: Any = partial(of, "rpc.admin.service")

SECURITY = (
    auth(TOKENS + "each_role_may_call_exactly_its_methods", "if not token.roles & roles:", "if not token.roles:",
         "any token may call any method"),
    auth(TOKENS + "each_role_may_call_exactly_its_methods", "return ROLES_OF.get(method, _ADMINS)",
         "return ROLES_OF.get(method, _READERS)", "readers may call administrative methods"),
    auth(TOKENS + "two_tokens_or_another_scheme_are_rejected", "if len(headers) == 1 and isinstance(text, str) and",
         "if isinstance(text, str) and", "the first of two tokens counts"),
    auth(TOKENS + "revoking_a_token_ends_its_streams", "            call.cancel()\n", "            pass\n",
         "streams of a revoked token go on"),
    auth(TOKENS + "an_expired_token_ends_its_streams", "call_later(left_s, self._end, call)",
         "call_later(left_s, self._ended.add, call)", "streams of an expired token go on"),
    auth(TOKENS + "an_administrator_can_revoke_its_own_token", "if c is not own]:", "if c]:",
         "who revokes its own token gets no answer"),
    auth(LIMITS + "open_calls_of_a_token_are_limited", "if len(token.calls) >= limit:", "if len(token.calls) > limit:",
         "a token may have one call too many"),
    auth(LIMITS + "the_masters_limit_of_calls_is_the_default", "token.calls_max or self._calls_max",
         "token.calls_max or 1000", "token_calls_max has no effect"),
    auth(TLS + "certificates_of_workers_and_clients_are_not_interchangeable",
         "if wanted not in kinds and roles != _ANY:", "if not kinds and roles != _ANY:",
         "a worker's certificate serves as a client's"),
    auth(AUDIT + "rejected_callers_cannot_fill_the_audit_log", "if now - self._logged_s >= LOG_INTERVAL_S:", "if True:",
         "callers without a token fill the log"),
    tokens(TOKENS + "an_invalid_token_is_rejected", "if token is None or not hmac.compare_digest(",
           "if token is None or hmac.compare_digest(b'', ", "the secret of a token is not checked"),
    tokens(TOKENS + "an_expired_token_is_unknown", "return None if self.expired(token) else token",
           "return token", "an expired token is valid"),
    tokens(WORKERS + "a_worker_cannot_take_anothers_id", 'if p.endswith("*") else worker_id == p',
           'if p.endswith("*") else worker_id.startswith(p)', "a worker takes an id that begins with its own"),
    tokens(LIMITS + "a_rate_holds_on_average", "self._level -= tasks", "self._level -= 1",
           "a rate counts batches, not tasks"),
    tokens(LIMITS + "a_rate_holds_on_average", "min(self.tasks_per_s, self._level + (", "(self._level + (",
           "an idle token may submit any number of tasks at once"),
    tokens(TOKENS + "an_invalid_token_request_is_rejected", "if WORKER in roles and len(roles) > 1:", "if not roles:",
           "a worker's token may have other roles"),
    tokens(TOKENS + "an_invalid_token_request_is_rejected", "if queues and (ADMIN in roles or WORKER in roles):",
           "if queues and WORKER in roles:", "an administrator's token names queues that do not limit it"),
    setup(TOKENS + "the_first_token_is_private_and_created_again_if_lost", "        tokens.remove(old.token_id)\n", "",
          "the lost first token stays valid"),
    setup(TOKENS + "tokens_survive_a_restart_and_secrets_are_not_stored", "_write_secret(path, text)",
          "_write_secret(path, text); path.with_name('copy').write_text(text)", "a secret is in a second file"),
    listeners(LISTENERS + "allowed_listen_settings", "if config.require_tokens and not config.tls_cert:",
              "if config.require_tokens and not (config.tls_cert or config.insecure):",
              "tokens cross the network in the clear"),
    listeners(LISTENERS + "allowed_listen_settings", "not config.insecure and not config.tls_client_ca:",
              "not config.insecure and not config.tls_cert:", "metrics are open to other hosts"),
    listeners(TLS + "a_key_readable_by_others_is_rejected", "if key.stat().st_mode & stat.S_IRWXO:", "if False:",
              "any user of the host may read the key"),
    listeners(TLS + "certificates_are_renewed_without_a_restart",
              'log.warning("new certificates are not used", error=str(error))\n                return None',
              "raise", "an invalid file ends TLS"),
    listeners(LISTENERS + "a_master_with_a_certificate_of_another_kind_is_rejected", "        if not fits:\n",
              "        if fits is None:\n", "a worker's certificate serves as the master's"),
    audit(AUDIT + "a_cancelled_call_is_audited_or_has_no_effect", "return await asyncio.shield(work)",
          "return await work", "a cancelled call has an effect and no line"),
    audit(AUDIT + "without_the_audit_file_calls_have_no_effect",
          "            except OSError as error:\n                text",
          "            except PermissionError as error:\n                text", "a call without a line takes effect"),
    audit(AUDIT + "files_are_rotated", "st_size < FILE_BYTES_MAX:", "st_size < 100 * FILE_BYTES_MAX:",
          "the audit log grows without limit"),
    audit(AUDIT + "a_large_request_is_cut", "return fields if len(text) <= REQUEST_CHARS_MAX else",
          "return fields if text else",
          "one call writes megabytes to the audit log"),
)  # fmt: skip

MESSAGES = (
    specs(SPECS + "living_large_specs_are_limited", "> LARGE_BYTES_MAX:", "> 1 << 40:", "large specs fill the memory"),
    specs(SPECS + "living_large_specs_are_limited", "self._large_bytes[queue] -= size", "self._large_bytes[queue] -= 0",
          "specs that are gone count for ever"),
    specs(SPECS + "the_result_ttl_is_limited", "if spec.result_ttl_s > self._result_ttl_max_s:", "if False:",
          "result_ttl_max_s has no effect"),
    specs(SPECS + "a_deadline_is_converted_to_the_masters_clock", "seconds_of(m.deadline) + skew_s",
          "seconds_of(m.deadline)",
          "a deadline is read by another clock"),
    leases(REGRESSIONS + "a_held_lease_is_limited", "min(max(m.attempt, 1), ATTEMPTS_MAX)", "max(m.attempt, 1)",
           "a worker names an attempt beyond the limit"),
    devices(WIRE + "a_non_finite_number_is_absent", "            message.ClearField(name)\n", "",
            "a number that is not finite is passed on"),
    devices(WIRE + "invalid_energy_is_ignored", "math.isfinite(x) and x >= 0.0", "x >= 0.0 or not math.isfinite(x)",
            "energy that is not finite counts"),
    devices(WIRE + "a_large_message_keeps_only_the_fields_of_the_core",
            "    if len(wire) > BYTES_MAX:\n        wire = device_pb2.DeviceTelemetry",
            "    if len(wire) < 0:\n        wire = device_pb2.DeviceTelemetry", "a sample of any size is kept"),
    devices(REGRESSIONS + "a_long_text_of_a_heartbeat_is_cut", "getattr(message, field)[:TEXT_CHARS_MAX]",
            "getattr(message, field)", "a text of any length is kept with each heartbeat"),
    models(MODELS + "invalid_reports_are_rejected_or_truncated", "    if m.ByteSize() > HELLO_BYTES_MAX:",
           "    if not m.ByteSize():",
           "a catalog of any size is kept"),
    models(REGRESSIONS + "a_large_hello_is_rejected", "map(_resident, itertools.islice(m.models, MODELS_MAX))",
           "map(_resident, m.models)", "any number of loaded models is kept"),
    workers(REGRESSIONS + "a_large_hello_is_rejected", "    if size > HELLO_BYTES_MAX:", "    if not size:",
            "a hello of any size is kept"),
    workers(NAMES + "names_with_control_characters_are_rejected", '    for field in ("worker_id", "host", "version"):',
            '    for field in ("host", "version"):', "a worker's id changes the terminal"),
    intake(TENANTS + "joining_another_tenants_task_is_rejected", "if queue is not None and not caller.may_see(queue):",
           "if live is None and queue is not None and not caller.may_see(queue):",
           "a tenant joins the task of another by its request_id"),
    intake(TENANTS + "submitting_to_another_tenants_queue_is_rejected",
           "    if not caller.may_see(queue):\n        return ev",
           "    if False:\n        return ev", "a tenant submits to the queue of another"),
    intake(LIMITS + "tasks_beyond_the_rate_are_rejected_with_a_delay", 'send fewer", delay_s', 'send fewer", None',
           "a rejection by rate has no delay"),
    queries(TENANTS + "lists_and_counts_hold_own_tasks_only", "and (self.queues is None or spec.queue in self.queues)",
            "and True", "a tenant counts the tasks of another"),
    service(TENANTS + "watch_sends_own_outcomes_only", "if queues is not None and row.queue not in queues:",
            "if False:",
            "a tenant watches the outcomes of another"),
    service(TENANTS + "a_guessed_task_id_is_not_found", "if not queries.may_see(found):", "if False:",
            "a tenant gets the task of another"),
    service(TASKS + "get_waits_only_as_long_as_asked", "min(seconds_of(request.wait), WAIT_MAX_S)", "WAIT_MAX_S",
            "Get waits longer than the caller asked"),
    sessions(WORKERS + "a_worker_cannot_take_anothers_id", "not caller.may_be(info.worker_id):",
             "not caller.worker_ids:",
             "a worker takes the id of another"),
    sessions(BAD_INPUT + "an_invalid_hello_is_rejected",
             "if hello.protocol_version != PROTOCOL_VERSION:",
             "if hello.protocol_version > PROTOCOL_VERSION:", "a worker of an older protocol joins"),
    sessions(REGRESSIONS + "a_worker_lists_no_more_leases_than_it_can_hold",
             "check_count(len(frame.heartbeat.leases), self._leases_max, LEASES)", "pass",
             "a heartbeat holds the event loop for seconds"),
    admin(OPERATORS + "a_connected_or_unknown_worker_cannot_be_forgotten",
          "        if worker.session:\n            raise",
          "        if False:\n            raise", "a connected worker is forgotten"),
    admin(TENANTS + "strategies_of_hidden_queues_are_those_of_unknown_queues",
          "visible = queues is None or request.queue in queues", "visible = True",
          "a tenant sees the strategy of another"),
    admin(REGRESSIONS + "rules_for_an_invalid_queue_name_are_rejected", '        check_printable("queue", name)\n', "",
          "the name of a queue changes the terminal"),
)  # fmt: skip

# What the master does before it knows a peer's token.
transport = partial(Mutation, module="multigpu_master.rpc.transport", checker="transport", seeds=1)
registration = partial(Mutation, module="multigpu_master.rpc.registration", checker="transport", seeds=1)
health = partial(Mutation, module="multigpu_master.rpc.health_service", checker="transport", seeds=1)

TRANSPORT = (
    health(
        name="a connection may have any number of health calls",
        old="if self._calls[peer] >= CALLS_MAX or ",
        new="if ",
        breaks="a peer that reads nothing holds 40 KiB for each call",
    ),
    health(
        name="any number of Watch streams of health",
        old="if self._watches >= WATCHES_MAX:",
        new="if self._watches >= 1_000_000:",
        breaks="connections without a token hold a gigabyte",
    ),
    transport(
        name="compressed messages are unpacked",
        old='    ("grpc.compression_enabled_algorithms_bitset", 1),\n',
        new="",
        breaks="61 KB of anybody take 60 MiB",
    ),
    transport(
        name="gRPC decodes the path of any call",
        old="return self._running_loop.create_task(self._answer(method))",
        new="return super()._make_request_call_future(method)",
        breaks="one frame of anybody ends the service",
    ),
    transport(
        name="health requests may be large",
        old="time.process_time() > cpu_s or time.monotonic() > end_s",
        new="time.monotonic() > end_s",
        breaks="anybody may have the master hold 64 MiB for each call of health",
    ),
    registration(
        name="a request is read before the token is checked",
        old="""        serve = serve if method.client_streaming else _reading(serve, name, read)
        serve = serve if auth is None else auth.guard(serve, name)
""",
        new="""        serve = serve if auth is None else auth.guard(serve, name)
        serve = serve if method.client_streaming else _reading(serve, name, read)
""",
        breaks="anybody may have the master hold 64 MiB for each call",
    ),
)

EDGE: tuple[Mutation, ...] = (*SECURITY, *MESSAGES, *TRANSPORT)
