"""Reads a page with the standard library's parser: that it is well nested, needs nothing else, and what is in it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta"}
LINKING = {"src", "href", "xlink:href", "data", "action", "srcset"}


class Page(HTMLParser):
    """A page. AssertionError where an element is closed that is not the open one, or a resource is named.

    `tables`: the cells of each, by row. `texts`: the words of elements, by their tag. `tags`: all elements with attributes.
    """

    def __init__(self, words: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[list[list[str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(words)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "img", "iframe", "object", "base"} and not LINKING & {name for name, _ in attrs}, tag
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        if tag not in VOID:
            self._open.append((tag, []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        opened, words = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>, {self.getpos()}"
        if tag in ("td", "th"):
            self.tables[-1][-1].append("".join(words))
        self.texts.setdefault(tag, []).append("".join(words))

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1][1].append(data)

    @property
    def facts(self) -> dict[str, str]:
        """The summary: the first table, by its first column."""
        return {row[0]: row[1] for row in self.tables[0]}


def number(words: str) -> int:
    """The first whole number in some words: "1,234 blocks" -> 1234."""
    digits = ""
    for char in words:
        if char.isdigit():
            digits += char
        elif digits and char != ",":
            break
    return int(digits)
