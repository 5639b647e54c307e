import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HealthState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_STATE_UNSPECIFIED: _ClassVar[HealthState]
    HEALTH_STATE_HEALTHY: _ClassVar[HealthState]
    HEALTH_STATE_DEGRADED: _ClassVar[HealthState]
    HEALTH_STATE_SICK: _ClassVar[HealthState]
    HEALTH_STATE_RECOVERING: _ClassVar[HealthState]

class MpsState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MPS_STATE_UNSPECIFIED: _ClassVar[MpsState]
    MPS_STATE_OFF: _ClassVar[MpsState]
    MPS_STATE_RUNNING: _ClassVar[MpsState]
    MPS_STATE_FAULT: _ClassVar[MpsState]
HEALTH_STATE_UNSPECIFIED: HealthState
HEALTH_STATE_HEALTHY: HealthState
HEALTH_STATE_DEGRADED: HealthState
HEALTH_STATE_SICK: HealthState
HEALTH_STATE_RECOVERING: HealthState
MPS_STATE_UNSPECIFIED: MpsState
MPS_STATE_OFF: MpsState
MPS_STATE_RUNNING: MpsState
MPS_STATE_FAULT: MpsState

class Device(_message.Message):
    __slots__ = ("device_id", "name", "product", "memory_total_bytes", "compute_capability", "pci_bus_id", "driver_version", "cuda_version", "mig_enabled", "mig_device_ids", "peers", "simulated", "members")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    PCI_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CUDA_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIG_ENABLED_FIELD_NUMBER: _ClassVar[int]
    MIG_DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    device_id: str
    name: str
    product: str
    memory_total_bytes: int
    compute_capability: str
    pci_bus_id: str
    driver_version: str
    cuda_version: str
    mig_enabled: bool
    mig_device_ids: _containers.RepeatedScalarFieldContainer[str]
    peers: _containers.RepeatedCompositeFieldContainer[DevicePeer]
    simulated: bool
    members: _containers.RepeatedCompositeFieldContainer[Device]
    def __init__(self, device_id: _Optional[str] = ..., name: _Optional[str] = ..., product: _Optional[str] = ..., memory_total_bytes: _Optional[int] = ..., compute_capability: _Optional[str] = ..., pci_bus_id: _Optional[str] = ..., driver_version: _Optional[str] = ..., cuda_version: _Optional[str] = ..., mig_enabled: bool = ..., mig_device_ids: _Optional[_Iterable[str]] = ..., peers: _Optional[_Iterable[_Union[DevicePeer, _Mapping]]] = ..., simulated: bool = ..., members: _Optional[_Iterable[_Union[Device, _Mapping]]] = ...) -> None: ...

class DevicePeer(_message.Message):
    __slots__ = ("device_id", "nvlinks", "common_ancestor")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_FIELD_NUMBER: _ClassVar[int]
    COMMON_ANCESTOR_FIELD_NUMBER: _ClassVar[int]
    device_id: str
    nvlinks: int
    common_ancestor: str
    def __init__(self, device_id: _Optional[str] = ..., nvlinks: _Optional[int] = ..., common_ancestor: _Optional[str] = ...) -> None: ...

class DeviceTelemetry(_message.Message):
    __slots__ = ("sample_time", "memory_total_bytes", "memory_used_bytes", "utilization", "temperature_celsius", "power_watts", "power_limit_watts", "memory_utilization", "sm_clock_hertz", "memory_clock_hertz", "throttle_reasons", "energy_joules", "ecc_corrected", "ecc_uncorrected", "remapped_rows", "pcie_generation", "pcie_width", "pcie_sent_bytes", "pcie_received_bytes", "nvlinks_active", "processes", "members", "memory_free_bytes")
    SAMPLE_TIME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_WATTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    SM_CLOCK_HERTZ_FIELD_NUMBER: _ClassVar[int]
    MEMORY_CLOCK_HERTZ_FIELD_NUMBER: _ClassVar[int]
    THROTTLE_REASONS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_JOULES_FIELD_NUMBER: _ClassVar[int]
    ECC_CORRECTED_FIELD_NUMBER: _ClassVar[int]
    ECC_UNCORRECTED_FIELD_NUMBER: _ClassVar[int]
    REMAPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PCIE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PCIE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    PCIE_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PCIE_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sample_time: _timestamp_pb2.Timestamp
    memory_total_bytes: int
    memory_used_bytes: int
    utilization: float
    temperature_celsius: float
    power_watts: float
    power_limit_watts: float
    memory_utilization: float
    sm_clock_hertz: float
    memory_clock_hertz: float
    throttle_reasons: _containers.RepeatedScalarFieldContainer[str]
    energy_joules: float
    ecc_corrected: int
    ecc_uncorrected: int
    remapped_rows: RemappedRows
    pcie_generation: int
    pcie_width: int
    pcie_sent_bytes: float
    pcie_received_bytes: float
    nvlinks_active: int
    processes: _containers.RepeatedCompositeFieldContainer[DeviceProcess]
    members: _containers.RepeatedCompositeFieldContainer[DeviceTelemetry]
    memory_free_bytes: int
    def __init__(self, sample_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., memory_total_bytes: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., utilization: _Optional[float] = ..., temperature_celsius: _Optional[float] = ..., power_watts: _Optional[float] = ..., power_limit_watts: _Optional[float] = ..., memory_utilization: _Optional[float] = ..., sm_clock_hertz: _Optional[float] = ..., memory_clock_hertz: _Optional[float] = ..., throttle_reasons: _Optional[_Iterable[str]] = ..., energy_joules: _Optional[float] = ..., ecc_corrected: _Optional[int] = ..., ecc_uncorrected: _Optional[int] = ..., remapped_rows: _Optional[_Union[RemappedRows, _Mapping]] = ..., pcie_generation: _Optional[int] = ..., pcie_width: _Optional[int] = ..., pcie_sent_bytes: _Optional[float] = ..., pcie_received_bytes: _Optional[float] = ..., nvlinks_active: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[DeviceProcess, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[DeviceTelemetry, _Mapping]]] = ..., memory_free_bytes: _Optional[int] = ...) -> None: ...

class RemappedRows(_message.Message):
    __slots__ = ("correctable", "uncorrectable", "pending", "failed")
    CORRECTABLE_FIELD_NUMBER: _ClassVar[int]
    UNCORRECTABLE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool
    def __init__(self, correctable: _Optional[int] = ..., uncorrectable: _Optional[int] = ..., pending: bool = ..., failed: bool = ...) -> None: ...

class DeviceProcess(_message.Message):
    __slots__ = ("pid", "memory_used_bytes", "mps_client", "idle")
    PID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MPS_CLIENT_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    memory_used_bytes: int
    mps_client: bool
    idle: bool
    def __init__(self, pid: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., mps_client: bool = ..., idle: bool = ...) -> None: ...

class DeviceHealth(_message.Message):
    __slots__ = ("state", "since_time", "reasons", "unusable", "checks_passed", "next_check_time")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_TIME_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_FIELD_NUMBER: _ClassVar[int]
    CHECKS_PASSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_CHECK_TIME_FIELD_NUMBER: _ClassVar[int]
    state: HealthState
    since_time: _timestamp_pb2.Timestamp
    reasons: _containers.RepeatedCompositeFieldContainer[HealthReason]
    unusable: bool
    checks_passed: int
    next_check_time: _timestamp_pb2.Timestamp
    def __init__(self, state: _Optional[_Union[HealthState, str]] = ..., since_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reasons: _Optional[_Iterable[_Union[HealthReason, _Mapping]]] = ..., unusable: bool = ..., checks_passed: _Optional[int] = ..., next_check_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class HealthReason(_message.Message):
    __slots__ = ("code", "message", "since_time")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SINCE_TIME_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    since_time: _timestamp_pb2.Timestamp
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., since_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class MpsStatus(_message.Message):
    __slots__ = ("state", "message", "clients", "clients_max")
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_MAX_FIELD_NUMBER: _ClassVar[int]
    state: MpsState
    message: str
    clients: int
    clients_max: int
    def __init__(self, state: _Optional[_Union[MpsState, str]] = ..., message: _Optional[str] = ..., clients: _Optional[int] = ..., clients_max: _Optional[int] = ...) -> None: ...
