"""Which tables of structures the device holds, and for which slots. One thread, the core's.

A place whose table no slot needs keeps it until another table takes the place: the one unused for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

from ..structure.tables import Table


class TableShelf:
    def __init__(self, places: int) -> None:
        self.fresh: dict[int, Table] = {}  # by place; what the next step must carry
        self._places = places
        self._place_of: OrderedDict[Table, int] = OrderedDict()  # the latest taken last
        self._holders: dict[int, set[int]] = {}  # slots, by place

    def take(self, table: Table, slot: int) -> int | None:
        """Where the device will hold it by the next step on; None: every place is in use."""
        place = self._place_of.get(table)
        if place is None:
            place = self._free_place()
            if place is None:
                return None
            self._place_of[table] = place
            self.fresh[place] = table
        self._place_of.move_to_end(table)
        self._holders.setdefault(place, set()).add(slot)
        return place

    def give_back(self, slot: int) -> None:
        for holders in self._holders.values():
            holders.discard(slot)

    def _free_place(self) -> int | None:
        if len(self._place_of) < self._places:
            taken = set(self._place_of.values())
            return next(place for place in count() if place not in taken)
        for table, place in self._place_of.items():
            if not self._holders.get(place):
                del self._place_of[table]
                return place
        return None
