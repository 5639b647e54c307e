"""System shared memory: clients on this host register regions of files in /dev/shm, which hold tensors.

The gateway reads and writes the files and does not map them: if a client truncates a file, a request fails, where an
access to mapped memory would end the gateway (SIGBUS).
"""

import os
import stat
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from google.protobuf.message import Message

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import BAD_REQUEST, CONFLICT, NOT_FOUND, TOO_MANY, HttpError
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.tensors import NamedTensor, data_of, values_of, wrong

FOLDER = "/dev/shm"  # noqa: S108  where shm_open(3) has its files
REGIONS_MAX = 1024
# Limit of the names and keys that clients choose.
NAME_CHARS_MAX = 255
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Parameters(msgspec.Struct):
    """Parameters of an input or output in shared memory."""

    shared_memory_region: str
    shared_memory_byte_size: _Size
    shared_memory_offset: _Size = 0


PARAMETERS = _Parameters.__struct_fields__


class Region:
    """A region of a file. The file stays open while the region is registered or a request uses it."""

    def __init__(self, request: pb.SystemSharedMemoryRegisterRequest) -> None:
        """Raises HttpError if the file can't be opened, is not a regular file, or ends before the region does."""
        self.key, self.offset, self.size = request.key, request.offset, request.byte_size
        try:
            self._file = os.open(f"{FOLDER}{self.key}", _FLAGS)
        except (OSError, ValueError) as error:  # ValueError: a NUL
            raise HttpError(BAD_REQUEST, f"can't open the shared memory {self.key!r}: {error}", param="key") from None
        weakref.finalize(self, os.close, self._file)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise HttpError(BAD_REQUEST, f"{self.key!r} is no shared memory", param="key")
        self.check()

    def check(self) -> None:
        """Raises HttpError if the file ends before the region does."""
        if self.offset + self.size > (found := os.fstat(self._file).st_size):
            message = f"the shared memory {self.key!r} has {found} bytes: too few for {self.size} from {self.offset} on"
            raise HttpError(BAD_REQUEST, message, param="byte_size")

    def read(self, offset: int, size: int) -> bytes:
        """Reads from an offset in the region. Raises HttpError if the file has become too small."""
        self.check()
        data = os.pread(self._file, size, self.offset + offset)
        if len(data) < size:
            raise HttpError(BAD_REQUEST, f"the shared memory {self.key!r} became smaller while it was read")
        return data

    def write(self, offset: int, data: bytes) -> None:
        """Writes at an offset in the region. Raises HttpError if the file has become too small or can't be written."""
        self.check()
        try:
            written = os.pwrite(self._file, data, self.offset + offset)
        except OSError as error:
            raise HttpError(BAD_REQUEST, f"can't write to the shared memory {self.key!r}: {error}") from None
        if written < len(data):
            raise HttpError(BAD_REQUEST, f"the shared memory {self.key!r} took {written} of {len(data)} bytes")


class Place:
    """The part of a region that holds an input, or gets an output."""

    def __init__(self, region: Region, given: _Parameters) -> None:
        self._region, self._given = region, given
        self.size = given.shared_memory_byte_size

    def read(self) -> bytes:
        """Returns the bytes of an input. Raises HttpError as Region.read does."""
        return self._region.read(self._given.shared_memory_offset, self.size)

    def put(self, output: NamedTensor) -> NamedTensor:
        """Writes an output. Returns it without data, for the response. Raises HttpError if it is larger than the place,
        or as Region.write does.
        """
        if (size := len(output.data)) > self.size:
            raise wrong(output.name, f"it has {size} bytes, and its shared memory {self.size}")
        self._region.write(self._given.shared_memory_offset, output.data)
        where = msgspec.structs.asdict(self._given) | {"shared_memory_byte_size": size}
        return replace(output, data=b"", parameters=where)


class Regions:
    """The regions of all clients, by name. `bytes_max`: the most bytes in shared memory that one request may read."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._regions: dict[str, Region] = {}

    async def register(
        self, request: pb.SystemSharedMemoryRegisterRequest, pair: ClientPair
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Registers a region. Raises HttpError if the name is invalid or in use, if there are too many regions, or if
        the file can't be used.
        """
        await _check_token(pair)
        name, key = request.name, request.key
        if not 1 <= len(name) <= NAME_CHARS_MAX:
            raise HttpError(BAD_REQUEST, f"a region's name has 1 to {NAME_CHARS_MAX} characters", param="name")
        if not key.startswith("/") or "/" in key[1:] or len(key) > NAME_CHARS_MAX:
            raise HttpError(BAD_REQUEST, f"{key!r} is no key: it is to be / and a name without another /", param="key")
        if name in self._regions:
            raise HttpError(CONFLICT, f"the shared memory region {name!r} is registered already", param="name")
        if len(self._regions) >= REGIONS_MAX:
            raise HttpError(TOO_MANY, f"there are {REGIONS_MAX:,} shared memory regions: unregister one")
        self._regions[name] = Region(request)
        return pb.SystemSharedMemoryRegisterResponse()

    async def unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, pair: ClientPair
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Unregisters a region, or all. Requests that use it keep it until they end. An unknown name is no error."""
        await _check_token(pair)
        if request.name:
            self._regions.pop(request.name, None)
        else:
            self._regions.clear()
        return pb.SystemSharedMemoryUnregisterResponse()

    async def status(
        self, request: pb.SystemSharedMemoryStatusRequest, pair: ClientPair
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Returns one region, or all. Raises HttpError if there is no such region."""
        await _check_token(pair)
        response = pb.SystemSharedMemoryStatusResponse()
        for name in [request.name] if request.name else self._regions:
            region = self._region(name)
            found = response.regions[name]
            found.name, found.key, found.offset, found.byte_size = name, region.key, region.offset, region.size
        return response

    def resolve(self, request: pb.ModelInferRequest, raw: Sequence[bytes]) -> tuple[Sequence[bytes], dict[str, Place]]:
        """Returns the bytes of each input (`raw` if none is in shared memory), and the places of outputs by name.
        Removes the parameters of shared memory. `raw`: the bytes of the other inputs; empty: they have contents. Raises
        HttpError if a region or its use is invalid.
        """
        inputs = {index: place for index, each in enumerate(request.inputs) if (place := self._pop_place(each))}
        outputs = {each.name: place for each in request.outputs if (place := self._pop_place(each))}
        if not inputs:
            return raw, outputs
        if raw and len(raw) != len(request.inputs) - len(inputs):
            message = f"{len(request.inputs) - len(inputs)} inputs are not in shared memory, and {len(raw)} came"
            raise HttpError(BAD_REQUEST, message, param="raw_input_contents")
        if (size := sum(each.size for each in inputs.values())) > self._bytes_max:
            message = f"the inputs in shared memory have {size:,} bytes: the limit is {self._bytes_max:,}"
            raise HttpError(BAD_REQUEST, message, param="inputs")
        others, found = iter(raw), []
        for index, given in enumerate(request.inputs):
            if index in inputs:
                found.append(inputs[index].read())
            elif raw:
                found.append(next(others))
            else:
                found.append(data_of(given))
                given.ClearField("contents")
        return found, outputs

    def _pop_place(
        self, tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor
    ) -> Place | None:
        """Removes the parameters of shared memory from an input or output. Returns its place, None if there are no such
        parameters. Raises HttpError if they are invalid.
        """
        values = {name: value for name, value in values_of(tensor.parameters).items() if name in PARAMETERS}
        if not values:
            return None
        try:
            given = msgspec.convert(values, _Parameters)
        except msgspec.ValidationError as error:
            raise wrong(tensor.name, str(error)) from None
        region = self._region(given.shared_memory_region)
        if given.shared_memory_offset + given.shared_memory_byte_size > region.size:
            why = f"{given.shared_memory_byte_size} bytes from {given.shared_memory_offset} on are not in the region"
            raise wrong(tensor.name, f"{why} {given.shared_memory_region!r}, which has {region.size}")
        for name in values:
            del tensor.parameters[name]
        return Place(region, given)

    def _region(self, name: str) -> Region:
        if name not in self._regions:
            raise HttpError(NOT_FOUND, f"there is no shared memory region {name!r}", param="shared_memory_region")
        return self._regions[name]


async def _check_token(pair: ClientPair) -> None:
    """Raises MultigpuError if the master does not accept the token for reading."""
    await pair.client.count()


async def cuda_status(_request: pb.CudaSharedMemoryStatusRequest, _pair: ClientPair) -> Message:
    """Returns no regions: GPU memory can't be shared. Clients call this before they start."""
    return pb.CudaSharedMemoryStatusResponse()


async def cuda_unregister(_request: pb.CudaSharedMemoryUnregisterRequest, _pair: ClientPair) -> Message:
    """Does nothing: no region can be registered. Clients call this before they start."""
    return pb.CudaSharedMemoryUnregisterResponse()
