"""The paper's filters of web data (section 2.3): short, foreign and boilerplate captions, and extreme aspect ratios."""

import re

MIN_WORDS = 3
MIN_ENGLISH_SHARE = 0.8
_BOILERPLATE = re.compile(
    r"\W*(?:(?:photo|image|picture|photograph|photographed|taken|captured|uploaded|created|posted|published)s?"
    r"(?: \w+)? (?:on|at|in|by|from)\b.*\d|(?:img|dsc|dscn|dscf|p|pict|image|photo|picture|untitled|file)[\W_]*\d*)\W*",
)


def rejects_caption(caption: str) -> str | None:
    """Why the paper's kind of filter leaves a caption out, or None.

    The paper names its criteria but neither thresholds nor patterns, and uses the classifier cld3 for the language.
    Here a caption needs three words, four fifths of its letters from the basic Latin alphabet, and more than a file
    name or a date such as `photographed on 4 May 2012`.
    """
    if len(caption.split()) < MIN_WORDS:
        return "short caption"
    letters = [character for character in caption if character.isalpha()]
    if sum(character.isascii() for character in letters) < MIN_ENGLISH_SHARE * max(1, len(letters)):
        return "caption not in English"
    if _BOILERPLATE.fullmatch(caption.lower()):
        return "boilerplate caption"
    return None


def rejects_size(size: tuple[int, int], max_aspect_ratio: float) -> bool:
    """Whether the longer side exceeds the shorter one by more than the ratio; the paper's is 2."""
    return max(size) > max_aspect_ratio * min(size)
