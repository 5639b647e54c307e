"""The protocol: stubs match their sources, names follow the rules of buf and AIP, and no field number is reused.

protos_fields.txt lists every number ever given. After adding fields:

    python tests/test_protos.py
"""

import functools
import re
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
REMEMBERED = Path(__file__).with_name("protos_fields.txt")
# Paths in a descriptor's source info: https://protobuf.com/docs/descriptors#source-code-info
SERVICE, METHOD = 6, 2
# Standard verbs, which AIP-131 to AIP-135 describe.
STANDARD_VERBS = ("List", "Get", "Set", "Delete", "Resume")


@functools.cache
def files() -> tuple[FileDescriptorProto, ...]:
    sources = sorted((ROOT / "protos").rglob("*.proto"))
    assert sources
    with tempfile.NamedTemporaryFile() as out:
        well_known = Path(protoc.__file__).parent / "_proto"
        arguments = [f"-I{ROOT / 'protos'}", f"-I{well_known}", "--include_source_info", f"-o{out.name}"]
        assert protoc.main(["protoc", *arguments, *map(str, sources)]) == 0
        return tuple(FileDescriptorSet.FromString(Path(out.name).read_bytes()).file)


def messages() -> Iterator[DescriptorProto]:
    for file in files():
        yield from file.message_type


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    generate = runpy.run_path(str(ROOT / "tools" / "generate_stubs.py"))["generate"]
    generate(tmp_path)
    wanted = {path.name: path.read_text() for path in (tmp_path / "multigpu" / "v1").iterdir()}
    checked_in = ROOT / "client" / "multigpu" / "v1"
    present = {path.name: path.read_text() for path in checked_in.glob("*_pb2*.py*")}
    assert present.keys() == wanted.keys()
    stale = [name for name in wanted if present[name] != wanted[name]]
    assert not stale, "run `python tools/generate_stubs.py`"


def test_the_gateways_stubs_are_those_of_its_protos(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "tools" / "generate_stubs.py"))["generate_gateway"](tmp_path)
    generated = sorted(path for path in tmp_path.rglob("*_pb2.py*"))
    assert [path.name for path in generated] == [
        "open_inference_pb2.py", "open_inference_pb2.pyi", "tei_pb2.py", "tei_pb2.pyi",
    ]  # fmt: skip
    for path in generated:
        checked_in = ROOT / "gateway" / path.relative_to(tmp_path)
        assert checked_in.read_text() == path.read_text(), "run `python tools/generate_stubs.py`"


def test_the_package_is_the_folder() -> None:
    for file in files():
        assert file.package == "multigpu.v1"
        assert Path(file.name).parent.as_posix() == file.package.replace(".", "/")
        assert file.syntax == "proto3"


def test_services_and_their_messages_are_named_by_the_rules() -> None:
    used: list[str] = []
    services = [service for file in files() for service in file.service]
    assert services
    for service in services:
        assert service.name.endswith("Service")
        for method in service.method:
            assert method.input_type == f".multigpu.v1.{method.name}Request"
            assert method.output_type == f".multigpu.v1.{method.name}Response"
            used += [method.input_type, method.output_type]
    assert len(used) == len(set(used)), "an rpc shares a message with another"
    envelopes = {f".multigpu.v1.{m.name}" for m in messages() if m.name.endswith(("Request", "Response"))}
    assert envelopes == set(used), "a Request or Response that no rpc uses"


def test_every_list_has_pages() -> None:
    lists = {message.name: {field.name for field in message.field} for message in messages()}
    for name, fields in lists.items():
        if re.fullmatch(r"List\w*Request", name):
            assert {"page_size", "page_token"} <= fields, name
        if re.fullmatch(r"List\w*Response", name):
            assert "next_page_token" in fields, name


def test_enums_begin_unspecified_and_prefix_their_values() -> None:
    enums = [enum for file in files() for enum in file.enum_type]
    assert enums
    for enum in enums:
        prefix = re.sub(r"(?<!^)([A-Z])", r"_\1", enum.name).upper() + "_"
        assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}UNSPECIFIED", 0)
        assert all(value.name.startswith(prefix) for value in enum.value), enum.name


def test_names_are_written_as_protobuf_writes_them() -> None:
    for message in messages():
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]+", message.name)
        for field in message.field:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", field.name), f"{message.name}.{field.name}"


def test_instants_and_durations_have_types_not_numbers() -> None:
    for message in messages():
        for field in message.field:
            place = f"{message.name}.{field.name}"
            assert not field.name.endswith(("_s", "_ms", "_ns", "_seconds", "_at")), (
                f"{place}: use a Duration or Timestamp"
            )
            if field.type_name == ".google.protobuf.Timestamp":
                assert re.search(r"(_time|deadline|_after|_before)$", field.name), place


def test_every_file_and_every_rpc_says_what_it_is_for() -> None:
    for file in files():
        places = file.source_code_info.location
        commented = {tuple(place.path) for place in places if place.leading_comments or place.trailing_comments}
        assert (12,) in commented, f"{file.name} begins without a comment"
        for s, service in enumerate(file.service):
            for m, method in enumerate(service.method):
                standard = method.name.startswith(STANDARD_VERBS) and service.name == "AdminService"
                assert standard or (SERVICE, s, METHOD, m) in commented, f"{service.name}.{method.name}"


def numbered() -> dict[str, str]:
    """`Message.number` to the field's name and type, for fields and enum values; reserved numbers map to nothing."""
    known: dict[str, str] = {}
    for message in messages():
        for field in message.field:
            kind = field.type_name or FieldDescriptorProto.Type.Name(field.type)
            known[f"{message.name}.{field.number}"] = f"{field.name} {kind}"
        for gap in message.reserved_range:
            known |= {f"{message.name}.{number}": "reserved" for number in range(gap.start, gap.end)}
    for file in files():
        for enum in file.enum_type:
            known |= {f"{enum.name}.{value.number}": value.name for value in enum.value}
            for hole in enum.reserved_range:
                known |= {f"{enum.name}.{number}": "reserved" for number in range(hole.start, hole.end + 1)}
    return known


def test_no_number_is_used_again_for_something_else() -> None:
    remembered = dict(line.split(": ") for line in REMEMBERED.read_text().splitlines())
    now = numbered()
    for place, meaning in remembered.items():
        if place.split(".")[0] in {key.split(".")[0] for key in now}:
            assert now.get(place) in (meaning, "reserved"), f"{place} was {meaning}: reserve it, use a new number"
    assert now.keys() <= remembered.keys(), "new numbers: run `python tests/test_protos.py` to remember them"


if __name__ == "__main__":
    REMEMBERED.write_text("".join(f"{place}: {meaning}\n" for place, meaning in sorted(numbered().items())))
