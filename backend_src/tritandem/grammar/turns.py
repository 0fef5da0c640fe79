"""Who goes next where tenants share: each in turn, and what one brings in its own order. Pure, one thread."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Generic, TypeVar

One = TypeVar("One")


class Turns(Generic[One]):
    def __init__(self) -> None:
        self._of_tenant: OrderedDict[str, deque[One]] = OrderedDict()  # who is next stands first; none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def held(self, tenant: str) -> int:
        return len(self._of_tenant.get(tenant, ()))

    def put(self, tenant: str, one: One) -> None:
        self._of_tenant.setdefault(tenant, deque()).append(one)
        self._count += 1

    def take(self, but: Collection[str] = ()) -> One | None:
        """None: there is none, or only of the tenants `but`."""
        tenant = next((one for one in self._of_tenant if one not in but), None)
        if tenant is None:
            return None
        queue = self._of_tenant[tenant]
        one = queue.popleft()
        self._count -= 1
        self._of_tenant.move_to_end(tenant)
        if not queue:
            del self._of_tenant[tenant]
        return one
