"""What the tests of `mgpuctl doctor` share: a host with settings, and the findings of one check."""

import time
from pathlib import Path
from typing import Any

import multigpu
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu import AdminClient
from multigpu.cli.doctor import doctor
from multigpu.cli.doctor.base import Check, Finding, Host, Verdict
from multigpu.config import config
from multigpu.v1 import admin_service_pb2 as admin

from tests.client.cli.fleet.fleet_samples import ago


def stats(**fields: Any) -> admin.GetStatsResponse:
    now = Timestamp()
    now.FromNanoseconds(time.time_ns())
    version = multigpu.__version__
    defaults: dict[str, Any] = {"version": version, "journal_writable": True, "server_time": now, "start_time": ago(60)}
    return admin.GetStatsResponse(**defaults | fields)


def host_of(address: str = "127.0.0.1:1", root: Path = Path("/"), worker: Any = None, **master: Any) -> Host:
    return Host(
        master_config=config.MasterConfig(**master),
        worker_config=config.WorkerConfig(**worker or {}),
        client_config=config.ClientConfig(master=address),
        master=AdminClient(address, connect_timeout_s=0),
        root=root,
    )


def verdicts(findings: list[Finding]) -> dict[str, str]:
    assert all(bool(f.remedy) == (f.verdict in (Verdict.WARN, Verdict.FAIL)) for f in findings), findings
    return {finding.check: finding.verdict.value for finding in findings}


def checked(check: Check, host: Host) -> Finding:
    return one(doctor.run_check(check, host))


def one(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    verdicts(findings)
    return findings[0]
