"""The contract keeps its shape: stubs match their sources, and the rules of buf and AIP that we follow hold.

Comments: a service's rpcs, messages and fields explain what their names leave open. What counts as open is mechanical,
in `needs_no_comment`, so that a new field either says what it is or has a name that already does.

Field numbers: protos_fields.txt remembers every number ever given. After adding fields:

    python tests/test_protos.py
"""

import functools
import re
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
REMEMBERED = Path(__file__).with_name("protos_fields.txt")
# Paths in a descriptor's source info: https://protobuf.com/docs/descriptors#source-code-info
MESSAGE, ENUM, SERVICE, FIELD, METHOD = 4, 5, 6, 2, 2
# Standard verbs do what AIP-131 to AIP-135 say; their mirrors undo what their twin explains.
STANDARD_VERBS = ("List", "Get", "Set", "Delete", "Resume")
# Words of the glossary, counted or named: nothing is left open.
GLOSSARY = frozenset(
    [
        "queued",
        "leased",
        "succeeded",
        "failed",
        "cancelled",
        "expired",
        "dead_lettered",
        "deleted",
        "workers_active",
        "workers_lost",
        "labels",
        "host",
        "pid",
        "aliases",
        "score_meaning",
        "data",
        "model",
        "payload",
        "queue",
    ]
)
SourcePath = tuple[int, ...]


@functools.cache
def files() -> tuple[FileDescriptorProto, ...]:
    sources = sorted((ROOT / "protos").rglob("*.proto"))
    assert sources
    with tempfile.NamedTemporaryFile() as out:
        well_known = Path(protoc.__file__).parent / "_proto"
        arguments = [f"-I{ROOT / 'protos'}", f"-I{well_known}", "--include_source_info", f"-o{out.name}"]
        assert protoc.main(["protoc", *arguments, *map(str, sources)]) == 0
        return tuple(FileDescriptorSet.FromString(Path(out.name).read_bytes()).file)


def comments(file: FileDescriptorProto) -> dict[SourcePath, str]:
    return {
        tuple(place.path): text
        for place in file.source_code_info.location
        if (text := (place.leading_comments + place.trailing_comments).strip())
    }


def messages() -> Iterator[tuple[FileDescriptorProto, int, DescriptorProto]]:
    for file in files():
        for index, message in enumerate(file.message_type):
            yield file, index, message


def is_envelope(name: str) -> bool:
    return name.endswith(("Request", "Response"))


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    generate = runpy.run_path(str(ROOT / "tools" / "generate_stubs.py"))["generate"]
    generate(tmp_path)
    wanted = {path.name: path.read_text() for path in (tmp_path / "multigpu" / "v1").iterdir()}
    checked_in = ROOT / "client" / "multigpu" / "v1"
    present = {path.name: path.read_text() for path in checked_in.glob("*_pb2*.py*")}
    assert present.keys() == wanted.keys()
    stale = [name for name in wanted if present[name] != wanted[name]]
    assert not stale, "run `python tools/generate_stubs.py`"


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
    envelopes = {f".multigpu.v1.{message.name}" for _, _, message in messages() if is_envelope(message.name)}
    assert envelopes == set(used), "a Request or Response that no rpc uses"


def test_every_list_has_pages() -> None:
    lists = {message.name: {field.name for field in message.field} for _, _, message in messages()}
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
    for _, _, message in messages():
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]+", message.name)
        for field in message.field:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", field.name), f"{message.name}.{field.name}"


def test_instants_and_durations_have_types_not_numbers() -> None:
    for _, _, message in messages():
        for field in message.field:
            place = f"{message.name}.{field.name}"
            assert not field.name.endswith(("_s", "_ms", "_ns", "_seconds", "_at")), (
                f"{place}: use a Duration or Timestamp"
            )
            if field.type_name == ".google.protobuf.Timestamp":
                assert re.search(r"(_time|deadline|_after|_before)$", field.name), place


def test_every_file_and_every_rpc_says_what_it_is_for() -> None:
    for file in files():
        said = comments(file)
        assert 12 in {path[0] for path in said if path}, f"{file.name} begins without a comment"
        for s, service in enumerate(file.service):
            for m, method in enumerate(service.method):
                standard = method.name.startswith(STANDARD_VERBS) and service.name == "AdminService"
                assert standard or (SERVICE, s, METHOD, m) in said, f"{service.name}.{method.name}"


def needs_no_comment(field: FieldDescriptorProto, explained: set[str]) -> bool:
    """Its name says what it is, or its type's own text does, or the same name is explained elsewhere."""
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        return field.name in explained
    return (
        field.name in explained
        or field.name in GLOSSARY
        or f"{field.name}s" in explained
        or field.type_name.startswith(".multigpu.v1.")
        or field.type_name == ".google.protobuf.Timestamp"
        or field.type == field.TYPE_BOOL
        or field.name.endswith(("_id", "_ids", "_bytes"))
    )


def test_a_field_that_leaves_something_open_has_a_comment() -> None:
    explained = {
        field.name
        for file, m, message in messages()
        for f, field in enumerate(message.field)
        if (MESSAGE, m, FIELD, f) in comments(file)
    }
    assert explained
    bare = [
        f"{message.name}.{field.name}"
        for file, m, message in messages()
        for f, field in enumerate(message.field)
        if (MESSAGE, m, FIELD, f) not in comments(file) and not needs_no_comment(field, explained)
    ]
    assert bare == []


def test_a_message_is_explained_by_itself_its_fields_or_the_field_that_carries_it() -> None:
    explained: set[str] = set()
    for file, m, message in messages():
        said = comments(file)
        fields = [field for f, field in enumerate(message.field) if (MESSAGE, m, FIELD, f) in said]
        explained |= {field.type_name.removeprefix(".multigpu.v1.") for field in fields}
        if fields or (MESSAGE, m) in said:
            explained.add(message.name)
    bare = [message.name for _, _, message in messages() if not is_envelope(message.name)]
    assert [name for name in bare if name not in explained] == []


@pytest.mark.parametrize("name", ["page_size", "duration", "retries"])
def test_the_comment_rule_can_fail(name: str) -> None:
    field = FieldDescriptorProto(name=name, type=FieldDescriptorProto.TYPE_INT32)
    assert not needs_no_comment(field, set())
    assert needs_no_comment(field, {name})


def numbered() -> dict[str, str]:
    """`Message.number` to the field's name and type, for fields and enum values; reserved numbers map to nothing."""
    known: dict[str, str] = {}
    for _, _, message in messages():
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
