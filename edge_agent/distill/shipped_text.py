"""Text that the machine's packages ship, as pools of snippets for prompts: manuals, descriptions, translations, code.

Beside it, texts of the user's own.

Every reader gives what it finds and nothing where there is nothing; the order of the files is fixed, so that a seed
means the same prompts on the same machine.
"""

from __future__ import annotations

import ast
import gettext
import gzip
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import ConfigError

PASSAGE_CHARS: Final = (250, 700)
LONG_PASSAGE_CHARS: Final = (900, 2200)
NEWS_CHARS: Final = (200, 900)
LONG_NEWS_CHARS: Final = (900, 2600)
SENTENCE_CHARS: Final = (24, 160)
FUNCTION_LINES: Final = (5, 30)
MAX_SOURCES: Final = 1500
MAX_OF_FAMILY: Final = 8
"""Files read whose names begin alike."""

_MACRO: Final = re.compile(r"^[.'].*$", re.MULTILINE)
_FONT: Final = re.compile(r"\\f(?:[A-Z\d]|\[\w*\]|\(\w\w)|\\[&|/,)^%]|\\s[+-]?\d")
_CHARACTER: Final = re.compile(r"\\\((\S\S)|\\\[(\S+?)\]")
_QUOTES: Final = {"aq": "'", "oq": "'", "cq": "'", "lq": '"', "rq": '"', "dq": '"', "em": "-", "en": "-", "bu": "-"}
_UMLAUTS: Final = {":a": "ä", ":o": "ö", ":u": "ü", ":A": "Ä", ":O": "Ö", ":U": "Ü", "ss": "ß"}
_NAMED: Final = _QUOTES | _UMLAUTS


@dataclass(frozen=True)
class TextRoots:
    """Where the machine keeps its text; another root for tests."""

    share: Path = Path("/usr/share")
    dpkg: Path = Path("/var/lib/dpkg/status")
    python: Path = Path(sysconfig.get_path("stdlib"))


def shipped_pools(roots: TextRoots, seed: int) -> dict[str, list[str]]:
    """Snippets by pool name; each pool is shuffled by the seed. A pool without any snippet is left out."""
    random_ = random.Random(seed)
    manuals = _manual_pages(roots.share / "man", random_)
    notes = _notes(roots.share / "doc", random_)
    pools = {
        "passage": _sized([*_paragraphs(manuals), *_paragraphs(notes)], PASSAGE_CHARS),
        "long_passage": _sized([*_merged(manuals), *_merged(notes)], LONG_PASSAGE_CHARS),
        "passage_de": _sized(_paragraphs(_manual_pages(roots.share / "man" / "de", random_)), (150, 500)),
        "passage_zh": _sized(_paragraphs(_manual_pages(roots.share / "man" / "zh_CN", random_)), (60, 300)),
        "description": list(_descriptions(roots.dpkg)),
        "package": list(_package_lines(roots.dpkg)),
        "sentence_en": [],
    }
    for language in ("zh_CN", "de", "fr", "es"):
        pairs = _translations(roots.share / "locale" / language / "LC_MESSAGES")
        pools[f"sentence_{language[:2]}"] = [theirs for _, theirs in pairs]
        pools["sentence_en"] += [english for english, _ in pairs]
    pools["function"], pools["function_head"] = _functions(roots.python, random_)
    for pool in pools.values():
        pool[:] = sorted(set(pool))
        random_.shuffle(pool)
    return {name: pool for name, pool in pools.items() if pool}


def own_pools(folder: Path, seed: int) -> dict[str, list[str]]:
    """Passages of the .txt files in the folder, as the pools `news` and `long_news`, shuffled by the seed.

    Blank lines part paragraphs; in a file without any, each line is one.

    Raises:
        ConfigError: the folder isn't there, holds no .txt file, one of them isn't UTF-8, or none has enough text.
    """
    if not folder.is_dir():
        raise ConfigError(f"--texts {folder}: no such folder")
    paths = sorted(folder.glob("**/*.txt"))
    if not paths:
        raise ConfigError(f"--texts {folder}: it holds no .txt file")
    pools: dict[str, set[str]] = {"news": set(), "long_news": set()}
    for path in paths:
        try:
            paragraphs = _own_paragraphs(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--texts {folder}: {path.name} can't be read: {error}") from error
        pools["news"].update(_joined(paragraphs, NEWS_CHARS))
        pools["long_news"].update(_joined(paragraphs, LONG_NEWS_CHARS))
    if not any(pools.values()):
        raise ConfigError(f"--texts {folder}: it holds no text of at least {NEWS_CHARS[0]} characters")
    random_ = random.Random(seed)
    return {name: random_.sample(sorted(pool), len(pool)) for name, pool in pools.items() if pool}


def _own_paragraphs(text: str) -> list[str]:
    parts = re.split(r"\n\s*\n", text.strip())
    return [" ".join(part.split()) for part in (parts if len(parts) > 1 else text.splitlines()) if part.strip()]


def _joined(parts: Iterable[str], size: tuple[int, int], separator: str = "\n\n") -> Iterator[str]:
    """Neighbouring parts together, until they have the size. A part that is too long is taken in by sentences."""
    held: list[str] = []
    for part in parts:
        if len(part) > size[1]:
            sentences = re.split(r"(?<=[.!?])\s+|(?<=[。！？])", part)
            yield from _joined((sentence for sentence in sentences if len(sentence) <= size[1]), size, " ")
            held = []
            continue
        if len(separator.join([*held, part])) > size[1]:
            held = []
        held.append(part)
        if len(joined := separator.join(held)) >= size[0]:
            yield joined
            held = []


def _manual_pages(root: Path, random_: random.Random) -> list[str]:
    return [_plain_manual(text) for text in _texts(root, ["man?/*.gz"], random_)]


def _notes(root: Path, random_: random.Random) -> list[str]:
    return list(_texts(root, ["*/README*", "*/NEWS*", "*/**/*.md", "*/**/*.rst", "*/**/*.txt"], random_))


def _texts(root: Path, patterns: Iterable[str], random_: random.Random) -> Iterator[str]:
    paths = sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()})
    random_.shuffle(paths)
    families: Counter[str] = Counter()
    for path in paths:
        # One tool may ship ten thousand pages that are all alike.
        family = re.split(r"[-_.]", str(path.relative_to(root)))[0]
        families[family] += 1
        if families[family] > MAX_OF_FAMILY:
            continue
        try:
            content = path.read_bytes()
            yield (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        except (OSError, EOFError, ValueError):  # A damaged file or another encoding: there are thousands of others.
            continue


def _plain_manual(source: str) -> str:
    """A manual page's prose: macros end a paragraph unless they only set words in another face."""
    source = re.sub(r'^\.\\".*$|^\'\\".*$', "", source, flags=re.MULTILINE)
    source = re.sub(r"^\.(?:[BI]|BR|IR|RB|RI|BI|IB)\s+(.*)$", _faced, source, flags=re.MULTILINE)
    text = _FONT.sub("", _MACRO.sub("\n", source)).replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ")
    return _CHARACTER.sub(lambda found: _NAMED.get(found[1] or found[2], ""), text)


def _faced(found: re.Match[str]) -> str:
    return found[1].replace('"', "").replace(" ", "") if found[0][2] in "RBI" else found[1].replace('"', "")


def _paragraphs(texts: Iterable[str]) -> list[str]:
    return [paragraph for text in texts for paragraph in _prose(text)]


def _merged(texts: Iterable[str]) -> Iterator[str]:
    """Neighbouring paragraphs together, up to the length of a long passage."""
    for text in texts:
        held: list[str] = []
        for paragraph in _prose(text):
            held.append(paragraph)
            if sum(map(len, held)) > LONG_PASSAGE_CHARS[0]:
                yield "\n\n".join(held)
                held = []


def _prose(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        if len(line) > 60 and sum(c.isalpha() or c == " " for c in line) > 0.85 * len(line):
            yield line


def _sized(texts: Iterable[str], size: tuple[int, int]) -> list[str]:
    return [text for text in texts if size[0] <= len(text) <= size[1]]


def _package_records(status: Path) -> Iterator[tuple[str, str, str]]:
    """Name, headline and long description of each package that is known here."""
    if not status.is_file():
        return
    for block in status.read_text(errors="replace").split("\n\n"):
        name = re.search(r"^Package: (.+)$", block, re.MULTILINE)
        found = re.search(r"^Description: (.+)\n((?: .*\n?)*)", block, re.MULTILINE)
        if name and found:
            yield name[1], found[1], " ".join(re.sub(r"^ \.$", "", found[2], flags=re.MULTILINE).split())


def _package_lines(status: Path) -> Iterator[str]:
    return (f"{name} ({headline})" for name, headline, _ in _package_records(status))


def _descriptions(status: Path) -> Iterator[str]:
    records = _package_records(status)
    return (f"{name}: {headline}. {long[:900]}" for name, headline, long in records if len(long) > 120)


def _translations(root: Path) -> list[tuple[str, str]]:
    """English messages and their translations, those that read as sentences."""
    pairs: list[tuple[str, str]] = []
    for path in sorted(root.glob("*.mo")):
        try:
            with path.open("rb") as file:
                catalogue = vars(gettext.GNUTranslations(file))["_catalog"]
        except (OSError, ValueError):
            continue
        pairs += [(key, value) for key, value in catalogue.items() if isinstance(key, str) and _is_pair(key, value)]
    return pairs


def _is_pair(english: str, theirs: object) -> bool:
    if not isinstance(theirs, str) or not SENTENCE_CHARS[0] <= len(english) <= SENTENCE_CHARS[1]:
        return False
    marks = set(english + theirs) & set("%{}<>\n\t\x04|=_")
    return not marks and english[0].isupper() and english.count(" ") >= 4 and theirs != english and len(theirs) >= 8


def _functions(root: Path, random_: random.Random) -> tuple[list[str], list[str]]:
    """Whole functions, and beginnings of functions with their docstring: the body is left to be written."""
    whole: list[str] = []
    heads: list[str] = []
    paths = sorted(root.glob("*.py")) + sorted(root.glob("*/*.py"))
    paths = [path for path in paths if "site-packages" not in path.parts and "test" not in path.parts]
    for path in random_.sample(paths, min(MAX_SOURCES, len(paths))):
        try:
            source = path.read_text()
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        lines = source.splitlines()
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            body = lines[node.lineno - 1 : node.end_lineno]
            if FUNCTION_LINES[0] <= len(body) <= FUNCTION_LINES[1]:
                whole.append("\n".join(body))
                if ast.get_docstring(node) and len(node.body) > 1:
                    heads.append("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
    return whole, heads
