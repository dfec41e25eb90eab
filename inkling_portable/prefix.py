"""The tree of prefixes whose state is kept: which pages hold which tokens, and where a sequence can start behind them.

A node is one page of tokens behind those of its parent. Multi-token-prediction depths make it matter what follows: the
entries of the last `follow` positions of a page depend on the `follow` tokens behind it. So a node is reached in two
ways. As the *end* of a prefix it is found by its own tokens, and those entries are computed again. On the way *through*
to a longer prefix, its entries are taken as they are: it is found by its tokens and the `follow` tokens behind them.
Where two texts part, the page before the parting exists once for each. Without depths (`follow` 0) both ways are one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

Key = tuple[int, tuple[int, ...]]


@dataclass(eq=False)
class Node:
    """A page of tokens; `pages` are those of its state by kind (None where given up), `snapshot` is the rest of the
    state at its end, where it is known.
    """

    serial: int
    parent: Node | None
    depth: int  # pages up to its end
    pages: dict[str, int | None]
    snapshot: list[torch.Tensor] | None = None
    hidden: torch.Tensor | None = None
    end: Key | None = None
    through: Key | None = None


@dataclass
class PrefixTree:
    """Nodes by what leads to them, and by which pages they hold. Nodes are passed around; only this class changes them.

    `kinds` names the kinds of pages. Serial number 0 stands for the root.
    """

    page_size: int
    follow: int
    kinds: tuple[str, ...]
    _ends: dict[Key, Node] = field(default_factory=dict)
    _through: dict[Key, Node] = field(default_factory=dict)
    _holding: dict[tuple[str, int], Node] = field(default_factory=dict)
    _recent: OrderedDict[Node, None] = field(default_factory=OrderedDict)
    _serial: int = 0

    def key(self, parent: int, keys: Sequence[int], index: int, follow: int = 0) -> Key:
        """What leads from node `parent` to page `index` of the tokens `keys`, with `follow` tokens behind the page."""
        return parent, tuple(keys[index * self.page_size : (index + 1) * self.page_size + follow])

    def prefixes(self, keys: Sequence[int], kind: str) -> Iterator[list[Node]]:
        """Chains of nodes that hold the beginning of `keys`, short of the last token, longest first; each node has its
        page of `kind`.
        """
        way: list[Node] = []
        ends: list[tuple[int, Node]] = []
        parent = 0
        for index in range((len(keys) - 1) // self.page_size):
            end = self._ends.get(self.key(parent, keys, index))
            if end is not None and end.pages[kind] is not None:
                ends.append((index, end))
            node = self._through.get(self.key(parent, keys, index, self.follow))
            if node is None or node.pages[kind] is None:
                break
            way.append(node)
            parent = node.serial
        for index, end in reversed(ends):
            yield [*way[:index], end]

    def add_through(self, parent: Node | None, keys: Sequence[int], pages: dict[str, int]) -> Node:
        """The node behind `parent` (None: the root) on the way through `keys`. It takes what it lacks from `pages`."""
        key = self.key(parent.serial if parent else 0, keys, parent.depth if parent else 0, self.follow)
        node = self._through.get(key)
        if node is None:
            node = self._held(pages) or self._new(parent)
            node.through, self._through[key] = key, node
        self._hold(node, pages)
        return node

    def find_end(self, parent: Node | None, keys: Sequence[int]) -> Node | None:
        """The end behind `parent` by the tokens of its page."""
        return self._ends.get(self.key(parent.serial if parent else 0, keys, parent.depth if parent else 0))

    def add_end(
        self,
        parent: Node | None,
        keys: Sequence[int],
        pages: dict[str, int],
        snapshot: list[torch.Tensor],
        hidden: torch.Tensor | None,
    ) -> None:
        """Make the page behind `parent` an end, with the state there, in place of one that has lost its state."""
        key = self.key(parent.serial if parent else 0, keys, parent.depth if parent else 0)
        if (old := self._ends.get(key)) is not None:
            old.end = old.snapshot = old.hidden = None
            self._drop_if_empty(old)
        node = self._held(pages) or self._new(parent)
        self._hold(node, pages)
        node.end, self._ends[key] = key, node
        node.snapshot, node.hidden = snapshot, hidden

    def touch(self, node: Node | None) -> None:
        """Mark a node and those that lead to it as used just now, the first one last: its loss would cost the most."""
        while node is not None:
            if node in self._recent:
                self._recent.move_to_end(node)
            node = node.parent

    def holds(self, kind: str, page: int) -> bool:
        return (kind, page) in self._holding

    def give_up(self, kind: str, holders: Sequence[int]) -> int | None:
        """Forget the least recently used page of a kind that no sequence holds (`holders[page]` is 0), if there is
        one.
        """
        for node in self._recent:
            page = node.pages[kind]
            if page is not None and holders[page] == 0:
                node.pages[kind] = node.snapshot = node.hidden = None
                del self._holding[kind, page]
                self._drop_if_empty(node)
                return page
        return None

    def _new(self, parent: Node | None) -> Node:
        self._serial += 1
        return Node(self._serial, parent, parent.depth + 1 if parent else 1, dict.fromkeys(self.kinds))

    def _held(self, pages: dict[str, int]) -> Node | None:
        """The node that holds one of a sequence's own pages already."""
        return next((node for item in pages.items() if (node := self._holding.get(item))), None)

    def _hold(self, node: Node, pages: dict[str, int]) -> None:
        for kind, page in pages.items():
            if node.pages[kind] is None and page >= 0 and not self.holds(kind, page):
                node.pages[kind] = page
                self._holding[kind, page] = node
        self._recent[node] = None
        self._recent.move_to_end(node)

    def _drop_if_empty(self, node: Node) -> None:
        if any(page is not None for page in node.pages.values()) or node not in self._recent:
            return
        del self._recent[node]
        if node.through is not None:
            del self._through[node.through]
        if node.end is not None:
            del self._ends[node.end]
