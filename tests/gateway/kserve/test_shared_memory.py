"""System shared memory, by Triton's own clients over gRPC and HTTP: the numbers are those of other requests; a wrong
region or place is named; a region that shrinks harms nobody.
"""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from multigpu import AdminClient
from multigpu.config.config import ConfigError, GatewayConfig
from multigpu_gateway.kserve import shared_memory as regions
from multigpu_gateway.main import check_listener
from tritonclient.utils import shared_memory

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.gateway.kserve.test_infer import COUNTS, X, scale_inputs, tensor, texts
from tests.gateway.kserve.test_models import rejected

pytest.importorskip("geventhttpclient", reason="the extra `http` of Triton's client is not installed")

import tritonclient.http as triton_http

FORMS: dict[str, Any] = {"grpc": triton, "http": triton_http}
STATUS = {"INVALID_ARGUMENT": "400", "NOT_FOUND": "404"}
SIZE, OUT = 4096, 1024


@pytest.fixture(scope="module")
def gateway(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with GatewayProcess(folder, fleet.address, "--kserve-shared-memory", "--body-bytes-max", "65536") as running:
        yield running


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Any:
    return FORMS[request.param]


@pytest.fixture
def client(form: Any, gateway: GatewayProcess) -> Iterator[Any]:
    with form.InferenceServerClient(gateway.grpc if form is triton else gateway.address) as found:
        found.unregister_system_shared_memory()
        found.unregister_cuda_shared_memory()
        yield found


@pytest.fixture
def key() -> Iterator[str]:
    """The key of a file with X at 0 and COUNTS behind it."""
    name = f"/multigpu-test-{uuid.uuid4().hex}"
    handle = shared_memory.create_shared_memory_region("r", name, SIZE)
    shared_memory.set_shared_memory_region(handle, [X, COUNTS])
    yield name
    shared_memory.destroy_shared_memory_region(handle)


def path(key: str) -> Path:
    return Path(f"/dev/shm{key}")


def failure(form: Any, call: Any, *args: Any, **options: Any) -> tuple[str, str]:
    """The code, of HTTP as that of gRPC, and the text."""
    code, text = rejected(call, *args, **options)
    if form is triton_http:
        code = next((name for name, status in STATUS.items() if status == code), code)
    return code, text


def shared_inputs(form: Any, region: str = "r", *, offset: int = 0, size: int = X.nbytes) -> list[Any]:
    x = form.InferInput("x", [2, 3], "FP32")
    x.set_shared_memory(region, size, offset)
    counts = form.InferInput("counts", [2, 1], "INT64")
    counts.set_data_from_numpy(COUNTS)
    return [x, counts]


def shared_output(form: Any, size: int = X.nbytes, *, offset: int = OUT) -> list[Any]:
    found = form.InferRequestedOutput("y")
    found.set_shared_memory("r", size, offset)
    return [found]


def test_inputs_and_outputs_in_a_region(form: Any, client: Any, key: str) -> None:
    client.register_system_shared_memory("r", key, SIZE)
    both = shared_inputs(form)
    both[1].set_shared_memory("r", COUNTS.nbytes, X.nbytes)
    for inputs in (shared_inputs(form), both):
        np.testing.assert_array_equal(client.infer("scale", inputs).as_numpy("y"), X * COUNTS)
        result = client.infer("scale", inputs, outputs=shared_output(form, SIZE - OUT))
        written = np.frombuffer(path(key).read_bytes(), np.float32, X.size, OUT).reshape(X.shape)
        np.testing.assert_array_equal(written, X * COUNTS)
        with path(key).open("r+b") as file:
            os.pwrite(file.fileno(), bytes(X.nbytes), OUT)
        output = result.get_output("y")
        if form is triton:
            assert list(result.get_response().raw_output_contents) == [b""]
            where = {
                name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in output.parameters.items()
            }
            assert where == {
                "shared_memory_region": "r", "shared_memory_byte_size": X.nbytes, "shared_memory_offset": OUT
            }  # fmt: skip
        else:
            assert output == {"name": "y", "datatype": "FP32", "shape": [2, 3]}


def test_regions_are_registered_listed_and_removed(form: Any, client: Any, key: str) -> None:
    assert "system_shared_memory" in str(client.get_server_metadata())
    client.register_system_shared_memory("a/b", key, 8, offset=16)
    client.register_system_shared_memory("c", key, SIZE)
    found = client.get_system_shared_memory_status("a/b")
    if form is triton:
        (region,) = found.regions.values()
        assert (region.name, region.key, region.offset, region.byte_size) == ("a/b", key, 16, 8)
        assert set(client.get_system_shared_memory_status().regions) == {"a/b", "c"}
        assert not client.get_cuda_shared_memory_status().ByteSize()
        assert rejected(client.register_cuda_shared_memory, "g", b"aGFuZGxl", 0, 8)[0] == "UNIMPLEMENTED"
    else:
        assert found == [{"name": "a/b", "key": key, "offset": 16, "byte_size": 8}]
        assert {each["name"] for each in client.get_system_shared_memory_status()} == {"a/b", "c"}
        assert client.get_cuda_shared_memory_status() == []
        assert rejected(client.register_cuda_shared_memory, "g", b"aGFuZGxl", 0, 8)[0] == "404"
    client.unregister_system_shared_memory("a/b")
    client.unregister_system_shared_memory("nobody")
    code, text = failure(form, client.get_system_shared_memory_status, "a/b")
    assert (code, text) == ("NOT_FOUND", "there is no shared memory region 'a/b'")
    client.unregister_system_shared_memory()
    assert failure(form, client.infer, "scale", shared_inputs(form, "c"))[0] == "NOT_FOUND"


def test_a_wrong_register_is_named(form: Any, client: Any, key: str, tmp_path: Path) -> None:
    (link, fifo) = (f"{key}-link", f"{key}-fifo")
    target = tmp_path / "target"
    target.write_bytes(bytes(SIZE))
    path(link).symlink_to(target)
    os.mkfifo(path(fifo))
    try:
        client.register_system_shared_memory("r", key, SIZE)
        for code, why, name, wrong_key, size, offset in (
            ("ALREADY_EXISTS", "registered already", "r", key, SIZE, 0),
            ("INVALID_ARGUMENT", "too few for", "s", key, SIZE + 1, 0),
            ("INVALID_ARGUMENT", "too few for", "s", key, SIZE, 1),
            ("INVALID_ARGUMENT", "too few for", "s", key, (1 << 63) - 1, (1 << 63) - 1),
            ("INVALID_ARGUMENT", "is no key", "s", key[1:], 8, 0),
            ("INVALID_ARGUMENT", "is no key", "s", f"/..{target}", 8, 0),
            ("INVALID_ARGUMENT", "is no key", "s", "", 8, 0),
            ("INVALID_ARGUMENT", "can't open", "s", "/..", 8, 0),
            ("INVALID_ARGUMENT", "can't open", "s", "/", 8, 0),
            ("INVALID_ARGUMENT", "can't open", "s", f"{key}-absent", 8, 0),
            ("INVALID_ARGUMENT", "can't open", "s", f"{key}\0", 8, 0),
            ("INVALID_ARGUMENT", "can't open", "s", link, 8, 0),
            ("INVALID_ARGUMENT", "is no shared memory", "s", fifo, 8, 0),
            ("INVALID_ARGUMENT", "a region's name has", "s" * 256, key, 8, 0),
        ):
            found = failure(form, client.register_system_shared_memory, name, wrong_key, size, offset)
            # Triton's HTTP has 400 for what exists already.
            assert (found[0], why in found[1]) == (code if form is triton else "INVALID_ARGUMENT", True), found
    finally:
        path(link).unlink()
        path(fifo).unlink()


def test_a_wrong_place_is_named(form: Any, client: Any, key: str) -> None:
    with path(f"{key}-large").open("wb") as file:
        file.truncate(1 << 30)
    client.register_system_shared_memory("large", f"{key}-large", 1 << 30)
    path(f"{key}-large").unlink()
    client.register_system_shared_memory("r", key, SIZE)
    for why, inputs, outputs in (
        ("there is no shared memory region 'nobody'", shared_inputs(form, "nobody"), None),
        ("24 bytes from 4073 on are not in the region 'r'", shared_inputs(form, offset=SIZE - 23), None),
        ("are not in the region 'r'", shared_inputs(form, offset=(1 << 63) - 1, size=(1 << 63) - 1), None),
        ("FP32 [2, 3] takes 24 bytes, and 20 came", shared_inputs(form, size=20), None),
        ("Expected `int` >= 0", shared_inputs(form, offset=-1), None),
        ("the inputs in shared memory have 65,537 bytes", shared_inputs(form, "large", size=65_537), None),
        ("it has 24 bytes, and its shared memory 23", shared_inputs(form), shared_output(form, 23)),
        ("are not in the region 'r'", shared_inputs(form), shared_output(form, SIZE + 1, offset=0)),
    ):
        code, text = failure(form, client.infer, "scale", inputs, outputs=outputs)
        assert (code, why in text) == ("NOT_FOUND" if "no shared" in why else "INVALID_ARGUMENT", True), text


def test_a_region_that_shrank(form: Any, client: Any, key: str) -> None:
    client.register_system_shared_memory("r", key, SIZE)
    os.truncate(path(key), 32)
    code, text = failure(form, client.infer, "scale", shared_inputs(form))
    assert (code, "has 32 bytes: too few for 4096" in text) == ("INVALID_ARGUMENT", True), text
    inputs = shared_inputs(form)
    inputs[0].set_data_from_numpy(X)
    assert failure(form, client.infer, "scale", inputs, outputs=shared_output(form))[0] == "INVALID_ARGUMENT"
    assert path(key).stat().st_size == 32, "the gateway does not make it larger"
    assert client.is_server_live()
    os.truncate(path(key), SIZE)


def test_a_request_keeps_its_region(gateway: GatewayProcess, fleet: Fleet, key: str) -> None:
    answered: list[Any] = []
    with triton.InferenceServerClient(gateway.grpc) as client, AdminClient(fleet.address) as admin:
        client.unregister_system_shared_memory()
        admin.pause_queue("kept")
        client.register_system_shared_memory("r", key, SIZE)
        client.async_infer(
            "scale", shared_inputs(triton), outputs=shared_output(triton), headers={"x-multigpu-queue": "kept"},
            callback=lambda result, error: answered.append(error or result),
        )  # fmt: skip
        until(lambda: list(admin.list_tasks(queue="kept")), 20)
        client.unregister_system_shared_memory("r")
        assert _open_files(gateway, key) == 1
        admin.resume_queue("kept")
        (result,) = until(lambda: answered, 20)
        assert list(result.get_response().raw_output_contents) == [b""]
        written = np.frombuffer(path(key).read_bytes(), np.float32, X.size, OUT)
        np.testing.assert_array_equal(written, (X * COUNTS).ravel())
        until(lambda: _open_files(gateway, key) == 0, 5)


def _open_files(gateway: GatewayProcess, key: str) -> int:
    folder = Path(f"/proc/{gateway.daemon.pid}/fd")
    return sum(os.path.realpath(each) == str(path(key)) for each in folder.iterdir())


def test_regions_are_bounded(gateway: GatewayProcess, key: str) -> None:
    with triton.InferenceServerClient(gateway.grpc) as client:
        client.unregister_system_shared_memory()
        for number in range(regions.REGIONS_MAX):
            client.register_system_shared_memory(str(number), key, 8)
        assert rejected(client.register_system_shared_memory, "more", key, 8)[0] == "RESOURCE_EXHAUSTED"
        client.unregister_system_shared_memory()
        until(lambda: _open_files(gateway, key) == 0, 5)


def test_the_pieces_of_a_text_are_not_written(gateway: GatewayProcess, key: str) -> None:
    answers: list[Any] = []
    with triton.InferenceServerClient(gateway.grpc) as client:
        client.unregister_system_shared_memory()
        client.register_system_shared_memory("r", key, SIZE)
        output = triton.InferRequestedOutput("text_output")
        output.set_shared_memory("r", OUT)
        client.start_stream(lambda result, error: answers.append(error or result))
        client.async_stream_infer("tiny", [tensor("text_input", texts("once"))], outputs=[output])
        (error,) = until(lambda: answers, 20)
        assert "each piece would overwrite the one before" in error.message()


def test_it_is_off_by_default(fleet: Fleet, tmp_path: Path, key: str) -> None:
    with GatewayProcess(tmp_path, fleet.address) as gateway, triton.InferenceServerClient(gateway.grpc) as client:
        assert "system_shared_memory" not in client.get_server_metadata().extensions
        assert rejected(client.register_system_shared_memory, "r", key, SIZE)[0] == "UNIMPLEMENTED"
        assert rejected(client.unregister_cuda_shared_memory)[0] == "UNIMPLEMENTED"
        code, text = rejected(client.infer, "scale", shared_inputs(triton))
        assert (code, "'shared_memory_" in text) == ("INVALID_ARGUMENT", True), text
        code, text = rejected(client.infer, "scale", scale_inputs(), outputs=shared_output(triton))
        assert (code, "'shared_memory_" in text) == ("INVALID_ARGUMENT", True), text
        with triton_http.InferenceServerClient(gateway.address) as http:
            assert rejected(http.get_system_shared_memory_status)[0] == "404"


@pytest.mark.parametrize("reached", [{"http": "0.0.0.0:8000"}, {"grpc": "0.0.0.0:8001"}])
def test_it_is_for_this_host_alone(reached: dict[str, Any]) -> None:
    check_listener(GatewayConfig(kserve_shared_memory=True))
    with pytest.raises(ConfigError, match="kserve_shared_memory is for this host alone"):
        check_listener(GatewayConfig(kserve_shared_memory=True, insecure=True, **reached))
