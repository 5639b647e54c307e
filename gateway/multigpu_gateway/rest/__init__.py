"""Tasks, outcomes and the fleet as REST: docs/compatibility.md, section "Tasks"."""

from multigpu.v1 import admin_service_pb2

from multigpu_gateway.http import EVENT_STREAM
from multigpu_gateway.rest import earlier, training
from multigpu_gateway.rest.errors import GONE, error_body
from multigpu_gateway.rest.fleet import queues, stats, usage, workers
from multigpu_gateway.rest.requests import NoQuery, OutcomesQuery, UsageQuery
from multigpu_gateway.rest.streams import LAST_EVENT_ID, outcomes
from multigpu_gateway.rest.tasks import PATH, PATHS, cancel, get, submit
from multigpu_gateway.routes import Operation, Route

_outcomes = Operation(outcomes, query=OutcomesQuery, content=EVENT_STREAM, headers=(LAST_EVENT_ID,), errors=(GONE,))
_workers = Operation(workers, query=NoQuery, response={"workers": [admin_service_pb2.Worker]})
_queues = Operation(queues, query=NoQuery, response={"queues": [admin_service_pb2.Queue]})
_usage = Operation(usage, query=UsageQuery, response=admin_service_pb2.GetUsageResponse)
_stats = Operation(stats, query=NoQuery, response=admin_service_pb2.GetStatsResponse)

ROUTES = {
    PATH: Route({"GET": get, "POST": submit, "DELETE": cancel}, error_body, prefix=True, paths=PATHS),
    "/v1/outcomes": Route({"GET": _outcomes}, error_body),
    "/v1/workers": Route({"GET": _workers}, error_body),
    "/v1/queues": Route({"GET": _queues}, error_body),
    "/v1/usage": Route({"GET": _usage}, error_body),
    "/v1/stats": Route({"GET": _stats}, error_body),
    "/api/v1/gpu/stats": Route({"GET": earlier.langchain_stats}, error_body),
    "/multigpu/health": Route({"GET": earlier.health}, error_body),
    "/multigpu/config": Route({"GET": earlier.onyx_config}, error_body),
    earlier.RECOMMENDATIONS: Route({"GET": earlier.recommendations}, error_body),
    earlier.GPU_TEST: Route({"POST": Operation(earlier.gpu_test, body=earlier.TestRequest)}, error_body),
    "/multigpu/stats": Route({"GET": earlier.onyx_stats}, error_body),
    earlier.GPU: Route({"GET": earlier.gpu_stats}, error_body, prefix=True, paths=earlier.GPU_PATHS),
    "/multigpu/resources/status": Route({"GET": earlier.resources}, error_body),
    "/multigpu/resources/manage": Route({"POST": Operation(earlier.manage, body=earlier.ManageRequest)}, error_body),
    "/multigpu/performance/metrics": Route({"GET": earlier.performance}, error_body),
    **{path: Route(methods, error_body) for path, methods in training.METHODS.items()},
}
