"""The page of a report as a tree of elements, for tests of what it shows."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "br"}


class Element:
    """An element of the page with its parent and its own text."""

    def __init__(self, tag: str, attributes: dict[str, str | None], parent: Element | None) -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children: list[Element] = []
        self.own_text = ""

    def within(self, tag: str) -> bool:
        return self.parent is not None and (self.parent.tag == tag or self.parent.within(tag))

    def every(self, tag: str) -> list[Element]:
        found = [self] if self.tag == tag else []
        return found + [each for child in self.children for each in child.every(tag)]

    def has_class(self, name: str) -> bool:
        return name in (self.attributes.get("class") or "").split()

    @property
    def text(self) -> str:
        parts = [self.own_text, *(child.text for child in self.children)]
        return " ".join(" ".join(parts).split())


class Page(HTMLParser):
    """All elements in order; fails if one is not closed. words: what a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.root = self._open = Element("root", {}, None)
        self.in_order: list[Element] = []
        self._shown: list[str] = []
        self.feed(html)
        assert self._open is self.root, f"{self._open.tag} is not closed"
        self.words = " ".join(" ".join(self._shown).split())
        self.tags = [(element.tag, element.attributes) for element in self.in_order]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), self._open)
        self._open.children.append(element)
        self.in_order.append(element)
        if tag not in _VOID:
            self._open = element

    def handle_endtag(self, tag: str) -> None:
        assert tag == self._open.tag
        self._open = self._open.parent

    def handle_data(self, data: str) -> None:
        self._open.own_text += data
        if self._open.tag not in {"script", "style"}:
            self._shown.append(data)
