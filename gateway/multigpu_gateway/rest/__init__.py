"""Tasks, outcomes and the fleet as REST: docs/compatibility.md, section "Tasks"."""

from multigpu_gateway.rest import earlier
from multigpu_gateway.rest.errors import error_body
from multigpu_gateway.rest.fleet import queues, stats, workers
from multigpu_gateway.rest.streams import outcomes
from multigpu_gateway.rest.tasks import PATH, cancel, get, submit
from multigpu_gateway.routes import Route

ROUTES = {
    PATH: Route({"GET": get, "POST": submit, "DELETE": cancel}, error_body, tree=True),
    "/v1/outcomes": Route({"GET": outcomes}, error_body),
    "/v1/workers": Route({"GET": workers}, error_body),
    "/v1/queues": Route({"GET": queues}, error_body),
    "/v1/stats": Route({"GET": stats}, error_body),
    "/api/v1/gpu/stats": Route({"GET": earlier.langchain_stats}, error_body),
    "/multigpu/health": Route({"GET": earlier.health}, error_body),
    "/multigpu/stats": Route({"GET": earlier.onyx_stats}, error_body),
    earlier.GPU: Route({"GET": earlier.gpu_stats}, error_body, tree=True),
    "/multigpu/resources/status": Route({"GET": earlier.resources}, error_body),
    "/multigpu/performance/metrics": Route({"GET": earlier.performance}, error_body),
}
