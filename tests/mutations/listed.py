"""The list of all mutations."""

from tests.mutations.lists.list_attempts import ATTEMPTS
from tests.mutations.lists.list_client import CLIENT
from tests.mutations.lists.list_edge import EDGE
from tests.mutations.lists.list_events import EVENTS
from tests.mutations.lists.list_gangs import GANGS
from tests.mutations.lists.list_journal import JOURNAL
from tests.mutations.lists.list_ledger import LEDGER
from tests.mutations.lists.list_placement import PLACEMENT
from tests.mutations.lists.list_quarantine import QUARANTINE
from tests.mutations.lists.list_residency import RESIDENCY
from tests.mutations.lists.list_sessions import SESSIONS
from tests.mutations.lists.list_store import IDS, STORE
from tests.mutations.lists.list_worker import WORKER
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *EVENTS, *SESSIONS, *ATTEMPTS, *PLACEMENT, *LEDGER, *WORKER, *JOURNAL, *QUARANTINE, *RESIDENCY, *CLIENT, *IDS,
    *EDGE, *STORE, *GANGS,
)  # fmt: skip

assert len({m.breaks for m in MUTATIONS}) == len(MUTATIONS), "each mutation breaks something else"
